"""The reward-function interface: score an answer against its ground truth."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, Self

from arealite.api.fields import Constraints, RewardOptions, named, with_options_of
from arealite.api.task import Task
from arealite.base.errors import EpisodeError
from arealite.base.registry import Registry


@dataclass(frozen=True, kw_only=True)
@with_options_of("reward")
class RewardConfig:
    """The reward function of an environment."""

    type: str = named("reward", "math_verify", "registered name of the reward function")

    def constraints(self) -> Constraints:
        """Yield the constraints of the options of other types."""
        for item in fields(self):
            options = getattr(self, item.name)
            if item.name != self.type and isinstance(options, RewardOptions):
                yield from options.unused_constraints(self.type)


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


rewards = Registry[type[Reward]].built_in("reward")


def make_reward(config: RewardConfig) -> Reward:
    """Create a reward function. Call its `setup` before the first `score`."""
    return rewards.get(config.type)(rewards.options(config))
