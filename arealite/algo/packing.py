"""Cut rows of unequal length into micro-batches: right-padded, or packed end to end.

Here because every rank must know from lengths alone how many micro-batches the others run. A unit
is `together` consecutive rows that stay in one micro-batch, in their order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence

from arealite.algo.partition import balance

Plan = list[list[int]]
"""Row indices of each micro-batch."""

OVERHEAD = 24
"""What a micro-batch costs beside its tokens, in tokens; padding beyond it is cut away. Measured on
a CPU (tools/bench_train.py): 400 for a model of 0.1 million parameters, 90 for one of 0.8 million,
the less the larger; this keeps padding under 5 % of 512 rows, and costs the smallest model most."""


def padded(lengths: Sequence[int], budget: int, *, together: int = 1) -> Plan:
    """Plan rows × longest row ≤ budget, unless one unit alone has more; longest units first.

    A micro-batch ends where its padding would cost more than another micro-batch does: on evenly
    falling lengths that is where the sum of both costs is least.
    """
    longest = [max(lengths[i : i + together]) for i in range(0, len(lengths), together)]
    plan: Plan = []
    width = padding = 0
    for unit in sorted(range(len(longest)), key=lambda i: (-longest[i], i)):
        padding += (width - longest[unit]) * together
        if not plan or (len(plan[-1]) + together) * width > budget or padding > OVERHEAD:
            plan.append([])
            width, padding = longest[unit], 0
        plan[-1] += range(unit * together, (unit + 1) * together)
    return plan


def packed(lengths: Sequence[int], budget: int, *, together: int = 1) -> Plan:
    """Plan a sum of lengths ≤ budget, unless one unit alone is longer; sums are about equal.

    As many micro-batches as best-fit decreasing needs (about 11/9 of the fewest at most, Johnson
    et al. 1974), or one more, with units dealt anew to the least loaded where that keeps the
    budget.
    """
    if not lengths:
        return []
    held = [sum(lengths[i : i + together]) for i in range(0, len(lengths), together)]
    room: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    bin_of = [0] * len(held)
    for unit in sorted(range(len(held)), key=lambda i: (-held[i], i)):
        at = bisect_left(room, (held[unit], 0))
        left, number = room.pop(at) if at < len(room) else (budget, len(room))
        bin_of[unit] = number
        insort(room, (left - held[unit], number))
    bins = len(room)
    for more in (bins, bins + 1):
        dealt = balance(held, ranks=more)
        loads = [0] * more
        for unit, number in enumerate(dealt):
            loads[number] += held[unit]
        if max(loads) <= max([budget, *held]):
            bins, bin_of = more, dealt
            break
    plan: Plan = [[] for _ in range(bins)]
    for unit, number in enumerate(bin_of):
        plan[number] += range(unit * together, (unit + 1) * together)
    return plan


LAYOUTS: dict[str, Callable[..., Plan]] = {"padded": padded, "packed": packed}


def microbatches(
    lengths: Sequence[int],
    budget: int,
    *,
    layout: str = "padded",
    together: int = 1,
    all_lengths: Sequence[Sequence[int]] = (),
) -> Plan:
    """Return the plan of this rank's `lengths`: every row once, equal inputs give equal plans.

    Empty micro-batches follow up to the most that any rank of `all_lengths` needs, at least one,
    so that collectives stay aligned.
    """
    make = LAYOUTS[layout]
    plan = make(lengths, budget, together=together)
    most = max([1, *(len(make(part, budget, together=together)) for part in all_lengths)])
    return plan + [[]] * (most - len(plan))


def computed_tokens(lengths: Sequence[int], plan: Plan, layout: str = "padded") -> int:
    """Return how many tokens are computed, padding included."""
    if layout == "packed":
        return sum(lengths)
    return sum(len(rows) * max((lengths[i] for i in rows), default=0) for rows in plan)
