"""Options of on-policy distillation."""

from dataclasses import dataclass

from arealite.api.fields import Constraints, opt, sub


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """A teacher scores the tokens that the policy sampled; the policy learns from the scores."""

    teacher: str | None = opt(None, "Hugging Face folder of the teacher; null: no distillation")
    addresses: list[str] = sub(list, "host:port of the teacher's servers; []: the run starts one")
    coef: float = opt(1.0, "weight of log teacher - log policy in a token's advantage", above=0)
    only: bool = opt(False, "true: rewards are recorded, but only the teacher trains the policy")
    server_args: list[str] = sub(list, "overrides of the teacher's server: llm_server.type=vllm")
    timeout_s: float = opt(300.0, "time to score a trajectory; then the episode fails", above=0)

    @property
    def is_on(self) -> bool:
        """Whether there is a teacher."""
        return self.teacher is not None

    def constraints(self) -> Constraints:
        """Yield the constraints on the teacher."""
        needs_teacher = self.only or bool(self.addresses)
        yield (
            self.is_on or not needs_teacher,
            (
                "only=true and addresses need the folder of the teacher. "
                "Set trainer.ppo.distillation.teacher, or leave them out."
            ),
        )
