"""The curriculum: weights of task classes by their current success rates.

The functions are pure, because the draw of tasks must be reproducible from the ledger alone.
"""

from collections.abc import Iterable


def success_rate(shares: Iterable[float]) -> float:
    """Estimate a class's success rate by Laplace's rule of succession, with a group as one trial.

    Args:
        shares: Share of successful episodes in each recent group of the class.

    Returns:
        The rate, above 0 and below 1; 1/2 without groups.
    """
    successes = list(shares)
    num_successes = sum(successes)
    num_trials = len(successes)
    return (num_successes + 1.0) / (num_trials + 2.0)


def learnability(rate: float, *, floor: float) -> float:
    """Return the weight floor + (1 - floor)·4p(1 - p) of a class with success rate p.

    It is 1 at p = 1/2 and `floor` at p = 0 and p = 1. p(1 - p) is the variance of a reward of 0 or
    1, and so the expected squared advantage within a group. Sources: Rutherford et al. 2024 (arXiv
    2408.15099); for language models Foster and Foerster 2025 (arXiv 2502.12272). With a floor above
    0, every class is still sampled and its rate stays up to date.
    """
    spread = 4.0 * rate * (1.0 - rate)
    return floor + (1.0 - floor) * spread
