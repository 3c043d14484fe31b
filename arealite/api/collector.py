"""How episodes are run: the options of the collector."""

from __future__ import annotations

import re
from dataclasses import dataclass

from arealite.api.agent_config import AgentConfig
from arealite.api.env_config import EnvConfig
from arealite.api.fields import Constraints, opt, sub
from arealite.api.llm import LLMClientConfig, SamplingConfig


@dataclass(frozen=True, kw_only=True)
class PartConfig:
    """One environment of several in a run."""

    weight: float = opt(1.0, "its share of the tasks, relative to the others'", above=0)
    env: EnvConfig = sub(EnvConfig, "where")
    seats: dict[str, AgentConfig] = sub(dict, "who acts, by seat; others as collector.agent")
    train: str = opt("generated", "its rows, as dataset.train")
    eval: str | None = opt(None, "its held-out rows, as dataset.eval")


@dataclass(frozen=True, kw_only=True)
class AutoscaleConfig:
    """How many episodes run at a time, by the servers' load and what the trainer takes."""

    enabled: bool = opt(False, "adapt; collector.concurrency is then the most a worker runs")
    min_concurrency: int = opt(8, "the least a worker runs", at_least=1)
    utilisation: float = opt(
        0.9, "share of the requests that servers can run to be running", above=0, at_most=1
    )
    period_s: float = opt(5.0, "between decisions; at least a fifth of a turn's time", above=0)


@dataclass(frozen=True, kw_only=True)
class CollectorConfig:
    """How episodes are run: who sits where, how many at a time."""

    agent: AgentConfig = sub(AgentConfig, "who acts")
    seats: dict[str, AgentConfig] = sub(
        dict, "who acts instead in some seats, as in seats.judge.type=fixed_policy"
    )
    env: EnvConfig = sub(EnvConfig, "where")
    envs: dict[str, PartConfig] = sub(
        dict, "several environments, by names of your choice, instead of `env` and `seats`"
    )
    client: LLMClientConfig = sub(LLMClientConfig, "through which client it generates")
    sampling: SamplingConfig = sub(SamplingConfig, "how training tokens are drawn")
    group_size: int = opt(8, "episodes a task; advantages compare them", at_least=1)
    concurrency: int = opt(256, "episodes one rollout worker has in flight", at_least=1)
    autoscale: AutoscaleConfig = sub(AutoscaleConfig, "adapts the concurrency")
    episode_timeout_s: float = opt(600.0, "longer ones fail and are offered again", above=0)

    @property
    def parts(self) -> dict[str, PartConfig]:
        """All environments by name; the only one of a run has the name ""."""
        return self.envs or {"": PartConfig(env=self.env, seats=self.seats)}

    def constraints(self) -> Constraints:
        """Yield the constraints on environments' names, sampling and concurrency."""
        bad = [name for name in self.envs if not re.fullmatch(r"[A-Za-z0-9_-]+", name)]
        yield not bad, f"envs.{''.join(bad[:1])}: use letters, digits, '_' and '-' only."
        yield (
            self.sampling.temperature > 0,
            "sampling.temperature must be above 0: greedy cannot explore.",
        )
        least, most = self.autoscale.min_concurrency, self.concurrency
        yield (
            least <= most or not self.autoscale.enabled,
            f"autoscale.min_concurrency={least} is above collector.concurrency={most}. Lower one "
            "or raise the other.",
        )


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Held-out evaluation, run beside training through the same servers."""

    every_steps: int = opt(0, "0: only before the first and after the last step", at_least=0)
    num_prompts: int = opt(0, "first rows of the held-out set; 0 takes all", at_least=0)
    samples: int = opt(1, "completions a prompt", at_least=1)
    sampling: SamplingConfig = sub(SamplingConfig, "how held-out tokens are drawn")
