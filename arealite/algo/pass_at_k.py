"""How often tasks are solved: pass@k and its uncertainty, from numbers of right samples."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, sqrt
from statistics import fmean, stdev
from typing import NamedTuple

Z_95 = 1.959964
"""Standard deviations of a normal distribution that hold 95 % of it to both sides."""


class Estimate(NamedTuple):
    """A mean over tasks, and the interval that holds the true one with 95 % confidence."""

    mean: float
    low: float
    high: float


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that one of `k` samples is right, from `c` right ones of `n`.

    1 - C(n - c, k) / C(n, k), without bias for k <= n (Chen et al. 2021, arXiv:2107.03374, eq. 1).
    """
    return 1.0 - comb(n - c, k) / comb(n, k)


def ks(n: int) -> list[int]:
    """Return the powers of two up to `n`, and `n`."""
    return sorted({n, *(1 << bit for bit in range(n.bit_length()))})


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> Estimate | None:
    """Average pass@k over tasks, each (n, c); None where no task has `k` samples.

    Tasks with fewer are left out. The interval is Wilson's (1927) for as many trials as tasks:
    values between 0 and 1 vary at most as a coin's with their mean, so it is never too narrow for
    that, and unlike the normal one it is no point where all tasks are solved or none.
    """
    values = [pass_at_k(n, c, k) for n, c in counts if n >= k]
    if not values:
        return None
    mean, trials, z2 = fmean(values), len(values), Z_95**2
    centre = (mean + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z_95 * sqrt(mean * (1 - mean) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    return Estimate(mean, max(0.0, centre - half), min(1.0, centre + half))


def mean_of_tasks(values: Sequence[float]) -> Estimate:
    """Average one value a task; the interval is the normal one of the mean.

    Tasks are what was drawn at random, not samples: those of one task are alike (Miller 2024,
    arXiv:2411.00640, clustered standard errors).
    """
    mean = fmean(values)
    half = Z_95 * stdev(values) / sqrt(len(values)) if len(values) > 1 else float("inf")
    return Estimate(mean, mean - half, mean + half)
