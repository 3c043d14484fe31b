"""Reward 1 when the last answer in a completion equals the ground truth mathematically, else 0.

The check is math-verify's, in killable processes; a check that never ends fails its episode instead
of scoring it 0.
"""

from __future__ import annotations

import re

from arealite.api.reward import MathVerifyConfig, Reward
from arealite.impl.reward.pool import CheckerPool

INTEGER = re.compile(r"[0-9]{1,64}|-[1-9][0-9]{0,63}")
"""A whole text that math-verify reads as exactly this integer. Left to it: "+5" and "-05", in which
it finds no answer, "-0", separators, and numbers so long that sympy's own limits decide."""


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
            RewardTimeout: the check ran longer than `timeout_s` and was killed.
            EpisodeError: the check ended its process, twice.
        """
        equal = equal_integers(completion, ground_truth)
        if equal is None:
            equal = await self.pool.check(completion, ground_truth)
        return 1.0 if equal else 0.0

    async def close(self) -> None:
        """End the pool's processes."""
        await self.pool.close()


def equal_integers(completion: str, truth: str) -> bool | None:
    """Decide without a process when both texts are nothing but an integer; None: ask math-verify.

    Then its verdict is known: its only pattern that matches a run of digits from end to end takes
    the number whole, drops leading zeros and makes a sympy Integer of it, and two Integers are
    equal exactly when their values are.
    """
    mine, theirs = completion.strip(), truth.strip()
    if not (INTEGER.fullmatch(mine) and INTEGER.fullmatch(theirs)):
        return None
    return int(mine) == int(theirs)
