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


def padded(rows: Sequence[np.ndarray], budget: int, *, rows_per_example: int = 1) -> Plan:
    """Plan micro-batches of at most `budget` tokens, padding included; longest examples first.

    A single example may exceed the budget. A micro-batch ends when its padding would cost more
    than another micro-batch.
    """
    size = rows_per_example
    longest = [max(map(len, rows[i : i + size])) for i in range(0, len(rows), size)]
    plan: Plan = []
    width = padding = 0
    for example in sorted(range(len(longest)), key=lambda i: (-longest[i], i)):
        padding += (width - longest[example]) * size
        if not plan or (len(plan[-1]) + size) * width > budget or padding > OVERHEAD:
            plan.append([])
            width = longest[example]
            padding = 0
        plan[-1] += range(example * size, (example + 1) * size)
    return plan


def packed(rows: Sequence[np.ndarray], budget: int, *, rows_per_example: int = 1) -> Plan:
    """Plan micro-batches of at most `budget` tokens without padding, with about equal sums.

    A token that rows of a part share is counted once (see `tree_parts`). A single example may
    exceed the budget. The number of micro-batches is that of best-fit decreasing (at most about
    11/9 of the optimum, Johnson et al. 1974), or one more. The parts are then redistributed, each
    to the least loaded micro-batch, if every micro-batch stays within the budget.
    """
    if not rows:
        return []
    parts, tokens = tree_parts(rows, budget, rows_per_example=rows_per_example)
    free: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    bin_of = [0] * len(tokens)
    for part, wanted in enumerate(tokens):
        at = bisect_left(free, (wanted, 0))
        left, number = free.pop(at) if at < len(free) else (budget, len(free))
        bin_of[part] = number
        insort(free, (left - wanted, number))
    bins = len(free)
    for count in (bins, bins + 1):
        balanced = balance(tokens, ranks=count)
        loads = [0] * count
        for part, number in enumerate(balanced):
            loads[number] += tokens[part]
        if max(loads) <= max([budget, *tokens]):
            bins = count
            bin_of = balanced
            break
    plan: Plan = [[] for _ in range(bins)]
    for part, number in enumerate(bin_of):
        plan[number] += parts[part]
    return plan


LAYOUTS: dict[str, Callable[..., Plan]] = {"padded": padded, "packed": packed}
