"""Options of the collector, which runs episodes, and of its agents."""

import re
from dataclasses import dataclass
from typing import Literal

from arealite.api.env import EnvConfig
from arealite.api.fields import Constraints, named, opt, part, sub, with_options_of
from arealite.api.llm import LLMClientConfig, SamplingConfig


@dataclass(frozen=True, kw_only=True)
class MathCodeSingleStepConfig:
    """An agent with one prompt and one completion."""

    system_prompt: str | None = opt(None, "system message before the task's messages")
    use_chat_template: bool | None = opt(
        None, "send a text as a user message in the model's chat template; null: if it has one"
    )


@dataclass(frozen=True, kw_only=True)
@with_options_of("agent")
class AgentConfig:
    """The agent of a seat."""

    type: str = named("agent", "math_code_single_step", "registered name of the agent")
    math_code_single_step: MathCodeSingleStepConfig = part(MathCodeSingleStepConfig)


@dataclass(frozen=True, kw_only=True)
class PartConfig:
    """One environment of a run with several."""

    weight: float = opt(1.0, "share of the tasks, relative to the other environments", above=0)
    env: EnvConfig = sub(EnvConfig, "the environment")
    seats: dict[str, AgentConfig] = sub(dict, "agent of each seat; default: collector.agent")
    train: str = opt("generated", "training rows of this environment, like dataset.train")
    eval: str | None = opt(None, "held-out rows of this environment, like dataset.eval")
    columns: dict[str, str] = sub(dict, "columns of its files, like dataset.columns")


@dataclass(frozen=True, kw_only=True)
class AutoscaleConfig:
    """Autoscaling of concurrent episodes by the servers' load and the trainer's demand."""

    enabled: bool = opt(False, "adapt the concurrency, up to collector.concurrency a worker")
    min_concurrency: int = opt(8, "lower limit of concurrent episodes of a worker", at_least=1)
    utilisation: float = opt(0.9, "target: used share of the servers' capacity", above=0, at_most=1)
    period_s: float = opt(5.0, "time between decisions; at least a fifth of a turn", above=0)


@dataclass(frozen=True, kw_only=True)
class CollectorConfig:
    """The collector: agents, environments, sampling and concurrency of episodes."""

    agent: AgentConfig = sub(AgentConfig, "agent of every seat without an entry in `seats`")
    seats: dict[str, AgentConfig] = sub(dict, "agents by seat, like seats.judge.type=fixed_policy")
    env: EnvConfig = sub(EnvConfig, "the environment")
    envs: dict[str, PartConfig] = sub(dict, "named environments, instead of `env` and `seats`")
    client: LLMClientConfig = sub(LLMClientConfig, "client of the LLM servers")
    sampling: SamplingConfig = sub(SamplingConfig, "sampling of training tokens")
    group_size: int = opt(8, "episodes per task; advantages compare them", at_least=1)
    routing: Literal["replay", "measure", "ignore"] = opt(
        "replay", "experts that servers report: train with them, only compare, or do not ask"
    )
    concurrency: int = opt(256, "concurrent episodes of one rollout worker", at_least=1)
    autoscale: AutoscaleConfig = sub(AutoscaleConfig, "automatic concurrency")
    episode_timeout_s: float = opt(600.0, "longer episodes fail and are retried", above=0)

    @property
    def parts(self) -> dict[str, PartConfig]:
        """All environments by name; the only one of a run has the name ""."""
        return self.envs or {"": PartConfig(env=self.env, seats=self.seats)}

    @property
    def agents(self) -> list[AgentConfig]:
        """The agents of all seats."""
        agents = [self.agent]
        for env_part in self.parts.values():
            agents += env_part.seats.values()
        return agents

    def constraints(self) -> Constraints:
        """Yield the constraints on names of environments, temperature and concurrency."""
        invalid_names = [name for name in self.envs if not _is_env_name(name)]
        first_invalid_name = "".join(invalid_names[:1])
        yield (
            not invalid_names,
            f"envs.{first_invalid_name}: use letters, digits, '_' and '-' only.",
        )
        explores = self.sampling.temperature > 0
        yield (
            explores,
            "sampling.temperature must be above 0: greedy sampling does not explore.",
        )
        lower_limit = self.autoscale.min_concurrency
        upper_limit = self.concurrency
        is_range = lower_limit <= upper_limit
        yield (
            is_range or not self.autoscale.enabled,
            (
                f"autoscale.min_concurrency={lower_limit} "
                f"is above collector.concurrency={upper_limit}. "
                "Lower one or raise the other."
            ),
        )


def _is_env_name(name: str) -> bool:
    """Return whether this name of an environment can be a part of option keys and metrics."""
    return re.fullmatch(r"[A-Za-z0-9_-]+", name) is not None


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Held-out evaluation during training, on the same servers."""

    every_steps: int = opt(0, "steps between evaluations; 0: only at start and end", at_least=0)
    num_prompts: int = opt(0, "number of held-out rows to use, from the first; 0: all", at_least=0)
    samples: int = opt(1, "completions per prompt", at_least=1)
    sampling: SamplingConfig = sub(SamplingConfig, "sampling of held-out tokens")
