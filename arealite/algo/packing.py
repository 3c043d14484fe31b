"""Divide rows of unequal length into micro-batches of right-padded rows.

An example is `rows_per_example` consecutive rows, which stay in one micro-batch in their order: a
pair of answers of DPO, or a single row. A plan is a deterministic function of the rows.
"""

from collections.abc import Sequence

from arealite.api.engine_extension import Plan

OVERHEAD = 24
"""Fixed cost of a micro-batch, in tokens. More padding than this starts a new micro-batch. Measured
on a CPU (tools/bench_train.py): 400 for a model of 0.1 million parameters, 90 for 0.8 million, and
less for larger models. 24 keeps padding below 5 % for 512 rows."""


def padded(
    lengths: Sequence[int],
    budget: int,
    *,
    rows_per_example: int = 1,
) -> Plan:
    """Plan micro-batches of at most `budget` tokens, padding included; longest examples first.

    A single example may exceed the budget. A micro-batch ends when its padding would cost more
    than another micro-batch.
    """
    example_widths = list[int]()
    for begin in range(0, len(lengths), rows_per_example):
        example_lengths = lengths[begin : begin + rows_per_example]
        example_widths.append(max(example_lengths))
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
