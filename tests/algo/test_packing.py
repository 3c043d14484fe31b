"""Micro-batch plans contain each row once and stay within the budget."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.algo import partition
from arealite.algo.partition import Plan, balance, padded

lengths_of = st.lists(st.integers(1, 200), max_size=40)
budgets = st.integers(1, 400)
MIXES = {"short": (20, 128), "long": (300, 4096)}
BUDGET = 8192


def draw(mix: str, count: int, seed: int = 0) -> list[int]:
    """Draw log-normal lengths, σ 0.8, clipped."""
    median, most = MIXES[mix]
    lengths = np.random.default_rng(seed).lognormal(np.log(median), 0.8, count)
    return np.clip(lengths.round(), 4, most).astype(int).tolist()


def area(lengths: list[int], rows: list[int]) -> int:
    return len(rows) * max(lengths[i] for i in rows)


def computed_tokens(lengths: list[int], plan: Plan) -> int:
    return sum(area(lengths, rows) for rows in plan)


@given(lengths_of, budgets, st.integers(1, 3))
def test_plan_has_every_row_once_within_budget_and_keeps_examples_whole(
    lengths: list[int], budget: int, size: int
) -> None:
    lengths = lengths[: len(lengths) // size * size]
    plan = padded(lengths, budget, rows_per_example=size)
    assert sorted(i for rows in plan for i in rows) == list(range(len(lengths)))
    for rows in plan:
        assert len(rows) <= size or area(lengths, rows) <= budget
        for at in range(0, len(rows), size):
            assert rows[at] % size == 0
            assert rows[at : at + size] == list(range(rows[at], rows[at] + size))
    assert plan == padded(list(lengths), budget, rows_per_example=size)
    assert computed_tokens(lengths, plan) >= sum(lengths)
    assert all(plan) or not lengths


@given(lengths_of, budgets)
def test_padded_rows_are_sorted_and_each_split_exceeds_budget_or_padding(
    lengths: list[int], budget: int
) -> None:
    plan = [rows for rows in padded(lengths, budget) if rows]
    for rows, after in pairwise(plan):
        assert lengths[rows[-1]] >= lengths[after[0]]
        more = [*rows, after[0]]
        padding = area(lengths, more) - sum(lengths[i] for i in more)
        assert area(lengths, more) > budget or padding > partition.MICRO_BATCH_OVERHEAD


def test_plans_match_examples_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [3, 9, 4, 4, 20]
    assert padded(lengths, 12) == [[4], [1], [2, 3, 0]]
    assert padded([], 12) == []
    monkeypatch.setattr(partition, "MICRO_BATCH_OVERHEAD", 5)
    assert padded([10, 9, 8, 7, 6], 100) == [[0, 1, 2], [3, 4]], "padding 3, would be 6"
    pairs = [3, 9, 4, 4, 8, 1]
    assert padded(pairs, 100, rows_per_example=2) == [[0, 1, 4, 5], [2, 3]]


def least_cost(lengths: list[int], budget: int) -> float:
    """Return the least cost in tokens over the splits of the sorted rows."""
    sizes = np.array(sorted(lengths, reverse=True))
    cost = np.zeros(len(sizes) + 1)
    for end in range(1, len(sizes) + 1):
        areas = (end - np.arange(end)) * sizes[:end]
        areas[:-1][areas[:-1] > budget] = 10**9
        cost[end] = (cost[:end] + areas + partition.MICRO_BATCH_OVERHEAD).min()
    return cost[-1]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("count", [512, 4096])
def test_padding_is_below_5_percent_for_log_normal_lengths(mix: str, count: int) -> None:
    for seed in range(3):
        lengths = draw(mix, count, seed)
        plan = padded(lengths, BUDGET)
        computed = computed_tokens(lengths, plan)
        assert (computed - sum(lengths)) / computed <= 0.05
        if count == 512:
            cost = computed + partition.MICRO_BATCH_OVERHEAD * len(plan)
            assert cost <= 1.03 * least_cost(lengths, BUDGET)
        ranks = [0] * 8
        for length, rank in zip(lengths, balance(lengths, ranks=8), strict=True):
            ranks[rank] += length
        assert min(ranks) >= 0.97 * max(ranks)


def test_torch_is_not_imported() -> None:
    code = (
        "import sys; import arealite.algo.partition, arealite.algo.reduction, "
        "arealite.algo.advantages; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
