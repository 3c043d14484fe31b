"""The reward-function interface: score an answer against its ground truth."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Self

from arealite.api.fields import Constraints, opt, part, sub
from arealite.api.task import Task
from arealite.base.errors import EpisodeError
from arealite.base.registry import Registry


@dataclass(frozen=True, kw_only=True)
class MathVerifyConfig:
    """The reward for an answer that is mathematically equal to the ground truth."""

    workers: int = opt(1, "checker processes of one rollout worker", at_least=1)
    timeout_s: float = opt(2.0, "CPU seconds of a check; slower ones give reward 0", above=0)


@dataclass(frozen=True, kw_only=True)
class FunctionRewardConfig:
    """The weighted sum of Python functions."""

    paths: list[str] = sub(list, "functions: module:name or file.py:name")
    weights: list[float] = sub(list, "weight of each function; []: 1 each")
    processes: int = opt(1, "processes of one worker that call the functions", at_least=1)
    timeout_s: float = opt(60.0, "seconds of a call; a longer one fails the episode", above=0)


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """The reward function of an environment."""

    type: str = opt("math_verify", "registered name of the reward function")
    math_verify: MathVerifyConfig = part(MathVerifyConfig)
    function: FunctionRewardConfig = part(FunctionRewardConfig)

    def constraints(self) -> Constraints:
        """Yield the constraint that `function.paths` are used."""
        paths = self.function.paths
        uses_paths = self.type == "function"
        yield (
            uses_paths or not paths,
            (
                f"type={self.type} uses no function.paths={paths}. "
                "Set type=function, or remove function.paths."
            ),
        )


class Score(float):
    """A reward with named parts. Each part is logged as the metric `reward/parts/NAME`."""

    def __new__(cls, value: float, /, **parts: float) -> Self:
        """Return the reward `value` with its parts."""
        score = super().__new__(cls, value)
        score.parts = parts
        return score

    parts: dict[str, float]


class Reward(ABC):
    """Scores completions. Each worker process has one instance for all episodes."""

    needs_truth = True
    """Whether a row without a ground truth, or with an empty one, cannot be scored."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    async def score(self, completion: str, ground_truth: str) -> float | None:
        """Return the reward of a completion: a number, or a `Score` with named parts.

        None: the completion has no score. It is not trained, and no mean contains it.

        Raises:
            EpisodeError: Scoring failed for a reason outside the completion.
        """

    async def score_task(self, completion: str, task: Task) -> float | None:
        """Return the reward of a completion, like `score`, with the whole row.

        Override this method to read other columns: `task.columns` is empty without an override.

        Raises:
            EpisodeError: Scoring failed, or the row has no ground truth.
        """
        return await self.score(completion, task.truth)

    async def check_row(self, task: Task) -> None:
        """Check that completions of this row can be scored.

        A run checks the first rows of each file before it starts any process.

        Raises:
            EpisodeError: They cannot.
        """
        if self.needs_truth and not task.truth.strip():
            raise EpisodeError("ground_truth is empty, and the reward compares with it")

    async def setup(self) -> None:  # noqa: B027  (optional hook)
        """Start shared, expensive resources."""

    async def begin_setup(self) -> None:
        """Begin `setup`; the first `score` may wait for its end."""
        await self.setup()

    async def close(self) -> None:  # noqa: B027  (optional hook)
        """Stop the resources of `setup`."""


rewards = Registry[Reward].built_in("reward")


def make_reward(config: RewardConfig) -> Reward:
    """Create a reward function. Call its `setup` before the first `score`."""
    return rewards.get(config.type)(rewards.options(config))
