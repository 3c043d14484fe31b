"""The environment: one episode is one call of the coroutine `run`. Its interface and options."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from arealite.api.agent import Agent
from arealite.api.fields import Constraints, named, sub, with_options_of
from arealite.api.runtime import RuntimeConfig, runtimes
from arealite.api.task import Row, Task
from arealite.api.trial import TrialConfig
from arealite.base.errors import UserError
from arealite.base.registry import Registry


class Env(ABC):
    """An environment. Each worker process has one instance; calls of `run` are concurrent."""

    seats: tuple[str, ...] = ("agent",)
    """Names of the keyword arguments of `run` that are agents."""
    resumable: bool = False
    """Whether `run` is deterministic: with the same task and the same generations it does the same.

    Such an environment draws no random numbers, reads no clock, and has no external effect that
    must not happen twice. If the worker of an episode crashes, another worker calls `run` again;
    the agents reuse the recorded generations, and rewards are computed again. An agent samples
    where its prompt or temperature equals no recorded one.
    """
    prompt_use: Literal["", "part", "first", "only"] = ""
    """How the agent sees a row's prompt: as a part of an observation, as the first observation, or
    as the only one. A start checks such prompts. "": another use, such as a task's name."""
    has_own_agents: bool = False
    """Whether the environment brings programs or functions that play; the rollout worker serves
    them, so it needs runtime.type=in_process. A start creates it, to check its options and seats.
    """

    def __init__(self, args: TrialConfig, config: Any) -> None:
        self.args = args
        """Names, seed and cluster of the run, or of the server that hosts the environment."""
        self.config = config
        """Options of this environment."""

    @classmethod
    def rows(cls, config: Any, *, split: str, seed: int) -> Iterator[Row]:
        """Yield an endless sequence of generated tasks, for `dataset.train=generated`.

        Equal arguments give equal rows. Rows of different splits differ.

        Args:
            config: Options of the environment.
            split: "train" or "eval".
            seed: Seed of the rows.

        Yields:
            Rows with `prompt`, `ground_truth` and `extra_info`.

        Raises:
            UserError: This environment generates no tasks.
        """
        raise UserError(
            f"{cls.__name__} generates no tasks. Set dataset.train and dataset.eval to files."
        )

    @classmethod  # noqa: B027  (optional hook)
    def check_row_options(cls, config: Any, task: Task) -> None:
        """Raise UserError if the options of this environment do not fit a row of a file."""

    @staticmethod
    def scores_with_reward(config: Any) -> bool:
        """Return whether the option `reward`, if there is one, scores every row."""
        return True

    @staticmethod  # noqa: B027  (optional hook)
    def check_row(task: Task, /) -> object:
        """Raise an exception if `run` cannot use this row of a file.

        A run checks the first rows of each file before it starts any process.

        Raises:
            Exception: The row is unusable. The error is shown with file and line.
        """

    async def setup(self) -> None:  # noqa: B027  (optional hook)
        """Start shared, expensive resources: a browser, a pool of sandboxes."""

    @abstractmethod
    async def run(self, task: Task, **agents: Agent) -> None:
        """Run one episode: call `act` of agents and give them rewards.

        Args:
            task: The task.
            **agents: The agent of each seat of `seats`, by name.

        Raises:
            EpisodeError: The episode failed. It is counted and offered again, never rewarded.
        """

    @cached_property
    def cleanup(self) -> AsyncExitStack:
        """The resources that `setup` has started. `close` stops them, the last one first."""
        return AsyncExitStack()

    async def close(self) -> None:
        """Stop the resources of `setup`; also called if `setup` failed."""
        await self.cleanup.aclose()


@dataclass(frozen=True)
class StepResult:
    """The result of one step of a StepEnv."""

    observation: object
    reward: float | None
    """None: the episode has no score (`Agent.reward`)."""
    done: bool


class StepEnv(Env):
    """An environment with Gymnasium's `reset` and `step`, and one seat."""

    @abstractmethod
    async def reset(self, task: Task) -> tuple[Any, Any]:
        """Begin an episode; return its state and the first observation."""

    @abstractmethod
    async def step(self, state: Any, action: Any) -> StepResult:
        """Apply an action to the state of an episode."""

    async def run(self, task: Task, **agents: Agent) -> None:
        """Run steps until the episode is done or the agent's last action."""
        (agent,) = agents.values()
        state, observation = await self.reset(task)
        done = False
        while not done:
            action = await agent.act(observation)
            result = await self.step(state, action)
            agent.reward(result.reward)
            observation = result.observation
            done = result.done or action.is_last


envs = Registry[type[Env]].built_in("env")


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


def make_env(
    args: TrialConfig,
    config: EnvConfig,
) -> Env:
    """Create an environment where `config.runtime` places it.

    Call its `setup` before the first episode.

    Args:
        args: The run's config.
        config: The environment's type, options and runtime.

    Raises:
        UserError: The runtime is unknown, or an option of it is missing.
    """
    make = runtimes.get(config.runtime.type)
    return make(args, config)
