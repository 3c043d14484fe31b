"""Options of the embedded server, in a process of its own or in the trainer's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from arealite.api.fields import Constraints, PublisherOptions, ServerOptions, opt

if TYPE_CHECKING:
    from arealite.api.experiment_config import ExperimentConfig, ServerConfig


@dataclass(frozen=True, kw_only=True)
class EmbeddedServerConfig(ServerOptions):
    """The built-in server: a transformers model behind SGLang's protocol, in one process."""

    max_running_requests: int = opt(256, "requests decoded together; more wait", at_least=1)
    num_threads: int = opt(1, "torch threads on a CPU", at_least=1)
    device: str = opt("auto", "auto, cpu or cuda")
    quantization: Literal["none", "int8"] = opt(
        "none", "int8: round the weights of layers, row by row; needs canary and self_check off"
    )
    batch_invariant: bool = opt(
        False, "true: a request gets the same numbers beside others and alone (CPU)"
    )
    max_restarts: int = opt(5, "consecutive restarts before the server serves", at_least=0)

    def supervise(
        self,
        config: "ServerConfig",
        command: Sequence[str],
        starter: Any,
    ) -> int:
        """Run the server in a child process; return the exit code."""
        from arealite.ext.embedded.server_supervisor import supervise

        return supervise(config, command, starter=starter)


@dataclass(frozen=True, kw_only=True)
class SharedPublisherConfig(PublisherOptions):
    """The publisher of a run without servers: the trainer generates while it waits for a batch."""

    needs_servers: ClassVar[bool] = False

    max_running_requests: int = opt(256, "requests decoded together; more wait", at_least=1)

    def run_constraints(self, config: "ExperimentConfig") -> Constraints:
        """Yield the constraints of a run whose trainer generates with the trained parameters."""
        key = "trainer.ppo.publisher.type=shared"
        num_ranks = config.launcher.trainer_ranks
        yield num_ranks == 1, f"{key} needs launcher.trainer_ranks=1, not {num_ranks}."
        has_servers = config.llm_server.addresses or config.launcher.llm_servers
        yield (
            not has_servers,
            f"{key} uses no LLM servers: remove llm_server.addresses and launcher.llm_servers.",
        )
        fsdp = config.trainer.ppo.engine.fsdp
        trains_adapter = fsdp.lora.rank > 0 or bool(config.model.adapter)
        keeps_float32 = fsdp.dtype == "float32" or trains_adapter
        yield (
            keeps_float32 and not fsdp.cpu_offload,
            (
                f"{key} generates from the trained parameters: "
                "use engine.fsdp.dtype=float32 or lora.rank above 0, and cpu_offload=false."
            ),
        )
