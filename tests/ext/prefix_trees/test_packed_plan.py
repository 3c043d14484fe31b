"""Plans of packed rows contain each row once, stay within the budget and are balanced."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from arealite.api.engine_extension import Plan
from arealite.ext.prefix_trees.packed_plan import packed
from tests.algo.test_packing import BUDGET, MIXES, budgets, draw, lengths_of


def microbatches(lengths: list[int], budget: int, rows_per_example: int = 1) -> Plan:
    """Plan rows of these lengths that have no common prefix."""
    rows = [np.arange(length) - 1000 * (i + 1) for i, length in enumerate(lengths)]
    return packed(rows, budget, rows_per_example=rows_per_example)


@given(lengths_of, budgets, st.integers(1, 3))
@example([27, 27, 27, 28, 28, 82], 81, 1)
def test_plan_has_every_row_once_within_budget_and_keeps_examples_whole(
    lengths: list[int], budget: int, size: int
) -> None:
    lengths = lengths[: len(lengths) // size * size]
    plan = microbatches(lengths, budget, rows_per_example=size)
    assert sorted(i for rows in plan for i in rows) == list(range(len(lengths)))
    for rows in plan:
        assert len(rows) <= size or sum(lengths[i] for i in rows) <= budget
        for at in range(0, len(rows), size):
            assert rows[at] % size == 0
            assert rows[at : at + size] == list(range(rows[at], rows[at] + size))
    assert plan == microbatches(list(lengths), budget, rows_per_example=size)
    assert all(plan) or not lengths


@given(lengths_of, budgets)
def test_packed_plan_has_few_micro_batches(lengths: list[int], budget: int) -> None:
    plan = microbatches(lengths, budget)
    loads = sorted(sum(lengths[i] for i in rows) for rows in plan)
    # Best fit leaves no two micro-batches that fit into one; balancing may add one more.
    assert len(plan) <= max(1, 2 * sum(lengths) / budget + 2)
    if lengths and max(lengths) <= budget:
        assert loads[-1] <= budget


def test_plans_match_examples_by_hand() -> None:
    lengths = [3, 9, 4, 4, 20]
    assert microbatches(lengths, 12) == [[4], [1], [2, 3, 0]]
    assert microbatches(lengths, 20) == [[4], [1, 2, 3, 0]]
    assert microbatches([], 12) == []
    pairs = [3, 9, 4, 4, 8, 1]
    assert microbatches(pairs, 17, rows_per_example=2) == [[0, 1], [4, 5, 2, 3]]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("count", [512, 4096])
def test_micro_batches_of_log_normal_lengths_are_balanced(mix: str, count: int) -> None:
    for seed in range(3):
        lengths = draw(mix, count, seed)
        plan = microbatches(lengths, BUDGET)
        loads = [sum(lengths[i] for i in rows) for rows in plan]
        assert min(loads) >= 0.97 * max(loads)
        assert len(plan) <= -(-sum(lengths) // BUDGET) + 1


def test_packing_rows_just_over_half_the_budget_is_fast() -> None:
    """One of several attempts must be fast, because steal time counts as CPU time."""
    lengths = [BUDGET // 2 + 1] * 2000 + [BUDGET // 3] * 2000

    def seconds() -> float:
        started = time.process_time()
        assert len(microbatches(lengths, BUDGET)) in (2000, 2001)
        return time.process_time() - started

    assert any(seconds() < 2.0 for _ in range(5))
