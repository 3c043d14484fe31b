"""An environment is an async program: one episode is one call of `run`, in plain Python control
flow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from arealite.api.agent import Agent
from arealite.api.fields import opt, sub
from arealite.api.reward import RewardConfig
from arealite.api.task import Task
from arealite.base.registry import Registry


@dataclass(frozen=True, kw_only=True)
class MathEnvConfig:
    """One question, one answer, scored by a reward function."""

    reward: RewardConfig = sub(RewardConfig, "how the answer is scored")


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """Which environment the episodes run in."""

    type: str = opt("math", "name in the table of environments")
    math: MathEnvConfig = sub(MathEnvConfig, "options of type=math")


class Env(ABC):
    """A world that agents act in. One instance a worker process; `run` is called concurrently."""

    seats: tuple[str, ...] = ("agent",)
    """Names of the keyword arguments under which `run` gets its agents."""
    resumable: bool = False
    """Whether `run`, called anew with the same task and the same generations, does the same: it
    draws nothing at random, reads no clock, each seat generates one turn at a time, and what it
    does outside may be done twice. Then an episode whose worker died goes on from its last durable
    turn: `run` begins again, and the agents' first generations are the recorded ones. Rewards are
    computed again. Where a prompt is another one after all, sampling goes on from there."""

    def __init__(self, args: Any, config: Any) -> None:
        self.args = args
        """The run's ExperimentConfig; read only names and cluster from it."""
        self.config = config
        """This environment's own config."""

    async def setup(self) -> None:  # noqa: B027  (optional hook)
        """Start what is shared and costly: a browser, a pool of sandboxes."""

    @abstractmethod
    async def run(self, task: Task, **agents: Agent) -> None:
        """Play one episode: let agents act and give them rewards.

        Raises:
            EpisodeError: the episode failed; it is counted and offered again, never rewarded.
        """

    async def close(self) -> None:  # noqa: B027  (optional hook)
        """Stop what `setup` started."""


@dataclass(frozen=True)
class StepResult:
    """What a step of a StepEnv gives back."""

    observation: Any
    reward: float
    done: bool


class StepEnv(Env):
    """For those who prefer reset and step: one acting seat, Gymnasium-like. State is per
    episode."""

    @abstractmethod
    async def reset(self, task: Task) -> tuple[Any, Any]:
        """Begin an episode; return (state, first observation)."""

    @abstractmethod
    async def step(self, state: Any, action: Any) -> StepResult:
        """Apply one action to the episode's state."""

    async def run(self, task: Task, **agents: Agent) -> None:
        """Step until done."""
        (agent,) = agents.values()
        state, observation = await self.reset(task)
        done = False
        while not done:
            result = await self.step(state, await agent.act(observation))
            agent.reward(result.reward)
            observation, done = result.observation, result.done


envs: Registry[Env] = Registry("env", {"math": "arealite.impl.env.math:MathEnv"})


class EnvFactory:
    """Makes environments by the name in their config."""

    def __init__(self, args: Any) -> None:
        self.args = args

    def make_env(self, config: EnvConfig) -> Env:
        """Return a new environment; call its `setup` before the first episode."""
        return envs.get(config.type)(self.args, getattr(config, config.type, None))
