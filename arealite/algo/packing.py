"""Divide rows of unequal length into micro-batches: right-padded, or packed end to end.

The plans depend on row lengths only, so that every rank can compute how many micro-batches the
other ranks run. An example is `rows_per_example` consecutive rows, which stay in one micro-batch in
their order: a pair of answers of DPO, or a single row.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from functools import partial

from arealite.algo.partition import balance

Plan = list[list[int]]
"""Row indices of each micro-batch."""

OVERHEAD = 24
"""Fixed cost of a micro-batch, in tokens. More padding than this starts a new micro-batch. Measured
on a CPU (tools/bench_train.py): 400 for a model of 0.1 million parameters, 90 for 0.8 million, and
less for larger models. 24 keeps padding below 5 % for 512 rows."""


def padded(lengths: Sequence[int], budget: int, *, rows_per_example: int = 1) -> Plan:
    """Plan micro-batches of at most `budget` tokens, padding included; longest examples first.

    A single example may exceed the budget. A micro-batch ends when its padding would cost more
    than another micro-batch.
    """
    size = rows_per_example
    longest = [max(lengths[i : i + size]) for i in range(0, len(lengths), size)]
    plan: Plan = []
    width = padding = 0
    for example in sorted(range(len(longest)), key=lambda i: (-longest[i], i)):
        padding += (width - longest[example]) * size
        if not plan or (len(plan[-1]) + size) * width > budget or padding > OVERHEAD:
            plan.append([])
            width, padding = longest[example], 0
        plan[-1] += range(example * size, (example + 1) * size)
    return plan


def packed(lengths: Sequence[int], budget: int, *, rows_per_example: int = 1) -> Plan:
    """Plan micro-batches of at most `budget` tokens without padding, with about equal sums.

    A single example may exceed the budget. The number of micro-batches is that of best-fit
    decreasing (at most about 11/9 of the optimum, Johnson et al. 1974), or one more. If it keeps
    the budget, the examples are redistributed, each to the least loaded micro-batch.
    """
    if not lengths:
        return []
    size = rows_per_example
    tokens = [sum(lengths[i : i + size]) for i in range(0, len(lengths), size)]
    free: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    bin_of = [0] * len(tokens)
    for example in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        at = bisect_left(free, (tokens[example], 0))
        left, number = free.pop(at) if at < len(free) else (budget, len(free))
        bin_of[example] = number
        insort(free, (left - tokens[example], number))
    bins = len(free)
    for count in (bins, bins + 1):
        balanced = balance(tokens, ranks=count)
        loads = [0] * count
        for example, number in enumerate(balanced):
            loads[number] += tokens[example]
        if max(loads) <= max([budget, *tokens]):
            bins, bin_of = count, balanced
            break
    plan: Plan = [[] for _ in range(bins)]
    for example, number in enumerate(bin_of):
        plan[number] += range(example * size, (example + 1) * size)
    return plan


LAYOUTS: dict[str, Callable[..., Plan]] = {"padded": padded, "packed": packed}


def microbatches(
    lengths: Sequence[int],
    budget: int,
    *,
    layout: str = "padded",
    rows_per_example: int = 1,
    all_lengths: Sequence[Sequence[int]] = (),
) -> Plan:
    """Plan the micro-batches of a rank. Equal inputs give equal plans.

    Args:
        lengths: The row lengths of this rank.
        budget: Largest number of tokens of a micro-batch; a single example may exceed it.
        layout: padded or packed.
        rows_per_example: Consecutive rows that stay in one micro-batch.
        all_lengths: The row lengths of every rank. The plan ends with empty micro-batches if
            another rank needs more, so that collectives stay aligned.

    Returns:
        The row indices of each micro-batch; at least one micro-batch, every row once.
    """
    plan_rows = partial(LAYOUTS[layout], budget=budget, rows_per_example=rows_per_example)
    plan, needed = plan_rows(lengths), [len(plan_rows(part)) for part in all_lengths]
    return plan + [[]] * (max([1, *needed]) - len(plan))


def computed_tokens(lengths: Sequence[int], plan: Plan, layout: str = "padded") -> int:
    """Return the number of computed tokens, padding included."""
    if layout == "packed":
        return sum(lengths)
    return sum(len(rows) * max((lengths[i] for i in rows), default=0) for rows in plan)
