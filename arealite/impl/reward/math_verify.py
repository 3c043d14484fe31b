"""Reward 1 when the last answer in a completion equals the ground truth mathematically, else 0.

The check runs in killable processes. An answer that needs more CPU time than a check may use,
or crashes its checker, is scored 0 with the part `unchecked`. A check that got no CPU, or was
killed for another reason, fails its episode.
"""

from __future__ import annotations

import re

from arealite.api.reward import MathVerifyConfig, Reward, Score
from arealite.impl.reward.pool import CheckerPool

INTEGER = re.compile(r"[-+]?[0-9]{1,64}")
"""A text that is one integer, short enough to be compared in the event loop."""


class MathVerifyReward(Reward):
    """Scores through a pool of `config.workers` processes."""

    def __init__(self, config: MathVerifyConfig) -> None:
        super().__init__(config)
        self.pool = CheckerPool(workers=config.workers, timeout_s=config.timeout_s)

    async def setup(self) -> None:
        """Start the pool."""
        await self.pool.start()

    async def score(self, completion: str, ground_truth: str) -> float:
        """Return 1.0 or 0.0.

        Raises:
            EpisodeError: the check failed for another reason than the answer.
        """
        equal = equal_integers(completion, ground_truth)
        if equal is None:
            equal = await self.pool.check(completion, ground_truth)
        if equal is None:
            return Score(0.0, unchecked=1.0)
        return 1.0 if equal else 0.0

    async def close(self) -> None:
        """End the pool's processes."""
        await self.pool.close()


def equal_integers(completion: str, truth: str) -> bool | None:
    """Compare two texts that are integers; None if a text is none, so a checker must decide."""
    mine, theirs = completion.strip(), truth.strip()
    if not (INTEGER.fullmatch(mine) and INTEGER.fullmatch(theirs)):
        return None
    return int(mine) == int(theirs)
