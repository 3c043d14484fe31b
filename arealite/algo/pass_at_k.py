"""pass@k and its confidence interval, from the number of right samples of each task."""

from collections.abc import Sequence
from math import comb, sqrt
from statistics import fmean
from typing import NamedTuple

Z_95 = 1.959964
"""A normal variable is within this many standard deviations of its mean with probability 95 %."""


class Estimate(NamedTuple):
    """A mean over tasks with its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate the probability that at least one of `k` samples of a task is right.

    1 - C(n - c, k) / C(n, k), unbiased for k <= n (Chen et al. 2021, arXiv:2107.03374, eq. 1).

    Args:
        n: Number of samples of the task.
        c: Number of right samples.
        k: At most `n`.
    """
    return 1.0 - comb(n - c, k) / comb(n, k)


def default_ks(n: int) -> list[int]:
    """Return the powers of two up to `n`, and `n`."""
    powers_of_two = [1 << bit for bit in range(n.bit_length())]
    return sorted({n, *powers_of_two})


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> Estimate | None:
    """Average pass@k over the tasks with at least `k` samples.

    The interval is Wilson's (1927), with tasks as trials. A value between 0 and 1 has at most the
    variance of a Bernoulli variable with the same mean, so the interval is not too narrow. Unlike
    the normal interval, it does not shrink to a point if all tasks are solved, or none.

    Args:
        counts: (samples, right samples) of each task.
        k: The k of pass@k.

    Returns:
        The estimate; None if no task has `k` samples.
    """
    rates = [pass_at_k(n, c, k) for n, c in counts if n >= k]
    if not rates:
        return None
    mean = fmean(rates)
    trials = len(rates)
    z2 = Z_95**2
    divisor = 1 + z2 / trials
    variance = mean * (1 - mean) / trials
    centre = (mean + z2 / (2 * trials)) / divisor
    half_width = Z_95 * sqrt(variance + z2 / (4 * trials**2)) / divisor
    return Estimate(
        mean=mean,
        low=max(0.0, centre - half_width),
        high=min(1.0, centre + half_width),
    )
