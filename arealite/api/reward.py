"""Reward functions: from an answer and its ground truth to a number, possibly through costly,
killable helpers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Self

from arealite.api.fields import opt, sub
from arealite.base.registry import Registry


@dataclass(frozen=True, kw_only=True)
class MathVerifyConfig:
    """Compares a completion's answer with the ground truth mathematically."""

    workers: int = opt(1, "checker processes of one rollout worker", at_least=1)
    timeout_s: float = opt(2.0, "CPU seconds of a check; an answer that needs more gets 0", above=0)


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Which reward function an environment scores with."""

    type: str = opt("math_verify", "name in the table of rewards")
    math_verify: MathVerifyConfig = sub(MathVerifyConfig, "options of type=math_verify")


class Score(float):
    """A reward with named parts, which are logged as metrics `reward/parts/NAME`."""

    def __new__(cls, value: float, **parts: float) -> Self:
        """Return the reward `value` with its parts."""
        score = super().__new__(cls, value)
        score.parts = parts
        return score

    parts: dict[str, float]


class Reward(ABC):
    """Scores completions. One instance a worker process, shared by all episodes."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    async def score(self, completion: str, ground_truth: str) -> float:
        """Return the reward of `completion`: a number, or a `Score` with named parts.

        Raises:
            EpisodeError: the completion cannot be scored, for a reason that is not its own.
        """

    async def setup(self) -> None:  # noqa: B027  (optional hook)
        """Start what is shared and costly."""

    async def close(self) -> None:  # noqa: B027  (optional hook)
        """Stop it."""


rewards: Registry[Reward] = Registry(
    "reward",
    {
        "math_verify": "arealite.impl.reward.math_verify:MathVerifyReward",
        "exact_match": "arealite.impl.reward.exact_match:ExactMatchReward",
    },
)


def make_reward(config: RewardConfig) -> Reward:
    """Return a new reward function; call its `setup` before the first score."""
    return rewards.get(config.type)(rewards.options(config))
