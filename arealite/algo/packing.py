"""Cut rows of unequal length into micro-batches of right-padded rows, by a budget of padded tokens.

Here because every rank must know from lengths alone how many micro-batches the others run.
"""

from __future__ import annotations

from collections.abc import Sequence


def microbatches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return row indices of each micro-batch, longest rows first.

    rows × longest row ≤ budget, unless one row alone is longer. Each row stands in exactly one
    micro-batch; equal inputs give equal plans. Sorting by length makes the padding small and this
    greedy cut the fewest micro-batches.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    plan: list[list[int]] = []
    start = 0
    while start < len(order):
        rows = max(1, budget // max(1, lengths[order[start]]))
        plan.append(order[start : start + rows])
        start += rows
    return plan


def num_microbatches(all_lengths: Sequence[Sequence[int]], budget: int) -> int:
    """Return how many micro-batches every rank runs: the most any rank needs, at least 1.

    A rank with fewer adds empty ones, so that collectives stay aligned.
    """
    return max([1, *(len(microbatches(lengths, budget)) for lengths in all_lengths)])


def padded_tokens(lengths: Sequence[int], plan: Sequence[Sequence[int]]) -> int:
    """Return how many tokens are computed, padding included."""
    return sum(len(rows) * max((lengths[i] for i in rows), default=0) for rows in plan)
