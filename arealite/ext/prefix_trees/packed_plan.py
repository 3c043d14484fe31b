"""Divide rows of unequal length into micro-batches of prefix trees, end to end.

A plan is a deterministic function of the rows (see `algo/partition.py`).
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from arealite.algo.partition import balance
from arealite.api.engine_extension import Plan
from arealite.ext.prefix_trees.prefix_tree import tree_parts


def packed(
    rows: Sequence[np.ndarray],
    budget: int,
    *,
    rows_per_example: int = 1,
) -> Plan:
    """Plan micro-batches of at most `budget` tokens without padding, with about equal sums.

    A token that rows of a part share is counted once (see `tree_parts`). A single example may
    exceed the budget. The number of micro-batches is that of best-fit decreasing (at most about
    11/9 of the optimum, Johnson et al. 1974), or one more. The parts are then redistributed, each
    to the least loaded micro-batch, if every micro-batch of several parts stays within the budget.
    """
    if not rows:
        return []
    parts, tokens = tree_parts(rows, budget, rows_per_example=rows_per_example)
    bin_of_part = _best_fit(tokens, budget)
    num_bins = max(bin_of_part) + 1
    for num_balanced in (num_bins, num_bins + 1):
        balanced = balance(tokens, ranks=num_balanced)
        num_tokens = np.bincount(balanced, tokens)
        num_parts = np.bincount(balanced)
        if ((num_tokens <= budget) | (num_parts == 1)).all():
            num_bins = num_balanced
            bin_of_part = balanced
            break
    plan: Plan = [[] for _ in range(num_bins)]
    for part, bin_index in enumerate(bin_of_part):
        plan[bin_index] += parts[part]
    return plan


def _best_fit(tokens: Sequence[int], budget: int) -> list[int]:
    """Return the bin of each part: the fullest one that has space for it, else a new one."""
    free: list[tuple[int, int]] = []  # (free tokens, bin), ascending
    bin_of_part = list[int]()
    for part_tokens in tokens:
        place = bisect_left(free, (part_tokens, 0))
        if place < len(free):
            free_tokens, bin_index = free.pop(place)
        else:
            free_tokens = budget
            bin_index = len(free)
        bin_of_part.append(bin_index)
        insort(free, (free_tokens - part_tokens, bin_index))
    return bin_of_part
