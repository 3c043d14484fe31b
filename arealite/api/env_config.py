"""Options of an environment: its type, its runtime, and the options of each type."""

from dataclasses import dataclass

from arealite.api.env import envs
from arealite.api.fields import Constraints, named, opt, part, sub, with_options_of
from arealite.api.runtime import RuntimeConfig


@dataclass(frozen=True, kw_only=True)
class ReverseConfig:
    """Reverse a text. reverse_echo has several turns; some ask for the text unchanged."""

    length: int = opt(5, "letters of a generated text", at_least=1)
    turns: int = opt(4, "turns of a generated task of reverse_echo", at_least=1)
    partial_credit: bool = opt(True, "reward the share of right letters; false: 1 or 0")


@dataclass(frozen=True, kw_only=True)
@with_options_of("env")
class EnvConfig:
    """The environment of the episodes."""

    type: str = named("env", "math", "registered name of the environment")
    runtime: RuntimeConfig = sub(RuntimeConfig, "process and host of the environment")
    reverse: ReverseConfig = part(ReverseConfig)
    reverse_echo: ReverseConfig = part(ReverseConfig)

    def constraints(self) -> Constraints:
        """Yield the constraint of environments whose agents the rollout worker serves."""
        runtime = self.runtime.type
        if runtime == "in_process":
            return
        yield (
            not envs.get(self.type).has_own_agents,
            (
                f"runtime.type={runtime}: the rollout worker serves the agents of "
                f"type={self.type}. Use runtime.type=in_process."
            ),
        )
