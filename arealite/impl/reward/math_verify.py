"""The reward `math_verify`: 1 if the last answer is mathematically equal to the truth, else 0.

The checks run in processes that can be killed. An answer that exceeds the CPU limit of a check or
crashes the checker has reward 0 and the part `unchecked`. If a check gets no CPU time or is killed
for another reason, the episode fails.
"""

from __future__ import annotations

import re

from arealite.api.reward import MathVerifyConfig, Reward, Score
from arealite.api.task import Task
from arealite.impl.reward.checker import number
from arealite.impl.reward.pool import CheckerPool

INTEGER = re.compile(r"[-+]?[0-9]{1,64}")
"""Matches one integer that is short enough to compare in the event loop."""

MAX_CHECKED = 200
"""Rows that `check_row` parses; the parser needs about 10 ms for each truth that is no number."""


class MathVerifyReward(Reward):
    """Scores completions in a pool of `config.workers` processes."""

    def __init__(self, config: MathVerifyConfig) -> None:
        super().__init__(config)
        self.checked = 0
        self.pool = CheckerPool(workers=config.workers, timeout_s=config.timeout_s)

    async def setup(self) -> None:
        """Start the pool."""
        await self.pool.start()

    async def score(self, completion: str, ground_truth: str) -> float:
        """Return 1.0 or 0.0.

        Raises:
            EpisodeError: The check failed for a reason outside the answer.
        """
        equal = equal_integers(completion, ground_truth)
        if equal is None:
            equal = await self.pool.check(completion, ground_truth)
        if equal is None:
            return Score(0.0, unchecked=1.0)
        return 1.0 if equal else 0.0

    async def check_row(self, task: Task) -> None:
        """Check that the ground truth has an answer.

        Raises:
            EpisodeError: It has none, or cannot be compared.
        """
        if number(task.truth) is None and self.checked < MAX_CHECKED:
            self.checked += 1
            await self.pool.check("", task.truth)

    async def close(self) -> None:
        """End the pool's processes."""
        await self.pool.close()


def equal_integers(completion: str, truth: str) -> bool | None:
    """Compare two integers; None if a text is not an integer and needs a checker."""
    mine, theirs = completion.strip(), truth.strip()
    if not (INTEGER.fullmatch(mine) and INTEGER.fullmatch(theirs)):
        return None
    return int(mine) == int(theirs)
