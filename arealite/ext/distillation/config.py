"""Options of on-policy distillation."""

from dataclasses import dataclass
from typing import Literal

from arealite.api.fields import Constraints, opt, sub


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """A teacher scores the tokens that the policy sampled; the policy learns from the scores."""

    teacher: str | None = opt(None, "Hugging Face folder of the teacher; null: no distillation")
    teachers: dict[str, str] = sub(dict, "folders of other teachers, by the rows' source (env)")
    addresses: list[str] = sub(list, "host:port of the teacher's servers; []: the run starts one")
    coef: float = opt(1.0, "weight of the teacher's term in the loss", above=0)
    only: bool = opt(False, "true: rewards are recorded, but only the teacher trains the policy")
    top_k: int = opt(
        0, "most probable tokens to compare; 0: only the sampled one", at_least=0, at_most=256
    )
    top_k_of: Literal["teacher", "policy"] = opt(
        "teacher", "whose most probable tokens; policy: needs sampling.top_logprobs=top_k"
    )
    kl: Literal["reverse", "forward"] = opt(
        "reverse", "KL(policy ‖ teacher), or KL(teacher ‖ policy), which needs top_k"
    )
    server_args: list[str] = sub(list, "overrides of the teacher's server: llm_server.type=vllm")
    timeout_s: float = opt(300.0, "time to score a trajectory; then the episode fails", above=0)

    @property
    def is_on(self) -> bool:
        """Whether there is a teacher."""
        return self.teacher is not None

    @property
    def folders(self) -> dict[str, str]:
        """The folder of each teacher by source; "" stands for all other sources."""
        return {"": self.teacher or "", **self.teachers}

    def constraints(self) -> Constraints:
        """Yield the constraints on the teacher."""
        needs_teacher = self.only or self.addresses or self.teachers
        yield (
            self.is_on or not needs_teacher,
            (
                "only=true, addresses and teachers need the folder of a teacher for all sources. "
                "Set trainer.ppo.distillation.teacher, or leave them out."
            ),
        )
        yield (
            self.top_k > 0 or self.kl == "reverse",
            "kl=forward compares several tokens. Set trainer.ppo.distillation.top_k=20.",
        )
        yield (
            self.top_k > 0 or self.top_k_of == "teacher",
            "top_k_of=policy compares several tokens. Set trainer.ppo.distillation.top_k=20.",
        )
        yield (
            not (self.addresses and self.teachers),
            "addresses names servers of one teacher. Leave them out, or teachers.",
        )
