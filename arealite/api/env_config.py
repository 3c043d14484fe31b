"""Options of an environment: its type, its runtime, and the options of each type."""

from dataclasses import dataclass

from arealite.api.env import envs
from arealite.api.fields import Constraints, named, sub, with_options_of
from arealite.api.runtime import RuntimeConfig


@dataclass(frozen=True, kw_only=True)
@with_options_of("env")
class EnvConfig:
    """The environment of the episodes."""

    type: str = named("env", "math", "registered name of the environment")
    runtime: RuntimeConfig = sub(RuntimeConfig, "process and host of the environment")

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
