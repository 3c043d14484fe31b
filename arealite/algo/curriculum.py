"""Weighs classes of tasks by how much a policy can learn from each now.

Pure functions of success rates, because what is drawn must follow from the ledger alone.
"""

from __future__ import annotations

from collections.abc import Iterable


def success_rate(shares: Iterable[float]) -> float:
    """Estimate a class's success rate from the share of successes in each of its recent groups.

    Laplace's rule of succession, a group for one trial: 1/2 where nothing is known yet, and never
    0 or 1.
    """
    known = list(shares)
    return (sum(known) + 1.0) / (len(known) + 2.0)


def learnability(rate: float, *, floor: float) -> float:
    """Return floor + (1 - floor)·4p(1 - p): 1 at p = 1/2, and `floor` where all succeed or fail.

    p(1 - p) is the variance of a reward of 0 or 1, so the expected squared advantage within a
    group. Sampling by it: Rutherford et al. 2024 (arXiv 2408.15099), for language models Foster and
    Foerster 2025 (arXiv 2502.12272). The floor keeps every class seen, so that its rate is known.
    """
    return floor + (1.0 - floor) * 4.0 * rate * (1.0 - rate)
