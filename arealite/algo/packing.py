"""Divide rows of unequal length into micro-batches: right-padded, or packed end to end.

An example is `rows_per_example` consecutive rows, which stay in one micro-batch in their order: a
pair of answers of DPO, or a single row. A plan is a deterministic function of the rows.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

import numpy as np

from arealite.algo.partition import balance
from arealite.algo.prefix_tree import tree_parts

Plan = list[list[int]]
"""Row indices of each micro-batch."""

OVERHEAD = 24
"""Fixed cost of a micro-batch, in tokens. More padding than this starts a new micro-batch. Measured
on a CPU (tools/bench_train.py): 400 for a model of 0.1 million parameters, 90 for 0.8 million, and
less for larger models. 24 keeps padding below 5 % for 512 rows."""


def padded(
    rows: Sequence[np.ndarray],
    budget: int,
    *,
    rows_per_example: int = 1,
) -> Plan:
    """Plan micro-batches of at most `budget` tokens, padding included; longest examples first.

    A single example may exceed the budget. A micro-batch ends when its padding would cost more
    than another micro-batch.
    """
    example_widths = list[int]()
    for begin in range(0, len(rows), rows_per_example):
        example_rows = rows[begin : begin + rows_per_example]
        example_widths.append(max(map(len, example_rows)))
    examples = range(len(example_widths))
    plan: Plan = []
    width = 0
    padding = 0
    for example in sorted(examples, key=lambda index: (-example_widths[index], index)):
        example_width = example_widths[example]
        padding += (width - example_width) * rows_per_example
        is_full = bool(plan) and (len(plan[-1]) + rows_per_example) * width > budget
        if not plan or is_full or padding > OVERHEAD:
            plan.append([])
            width = example_width
            padding = 0
        first_row = example * rows_per_example
        plan[-1] += range(first_row, first_row + rows_per_example)
    return plan


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
    to the least loaded micro-batch, if every micro-batch stays within the budget.
    """
    if not rows:
        return []
    parts, tokens = tree_parts(rows, budget, rows_per_example=rows_per_example)
    bin_of_part = _best_fit(tokens, budget)
    num_bins = max(bin_of_part) + 1
    largest_load = max([budget, *tokens])
    for num_balanced in (num_bins, num_bins + 1):
        balanced = balance(tokens, ranks=num_balanced)
        loads = [0] * num_balanced
        for part, bin_index in enumerate(balanced):
            loads[bin_index] += tokens[part]
        if max(loads) <= largest_load:
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


LAYOUTS: dict[str, Callable[..., Plan]] = {
    "padded": padded,
    "packed": packed,
}
