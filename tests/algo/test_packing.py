"""Micro-batch plans: nothing lost, nothing twice, never above the budget, the same on every
rank."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from arealite.algo.packing import microbatches, num_microbatches, padded_tokens

lengths_of = st.lists(st.integers(1, 200), max_size=40)
budgets = st.integers(1, 400)


@given(lengths_of, budgets)
def test_every_row_once_within_budget(lengths: list[int], budget: int) -> None:
    plan = microbatches(lengths, budget)
    assert sorted(i for rows in plan for i in rows) == list(range(len(lengths)))
    for rows in plan:
        assert len(rows) == 1 or len(rows) * max(lengths[i] for i in rows) <= budget
    assert plan == microbatches(list(lengths), budget)
    assert padded_tokens(lengths, plan) >= sum(lengths)


@given(lengths_of, budgets)
def test_no_row_of_the_next_would_have_fitted(lengths: list[int], budget: int) -> None:
    plan = microbatches(lengths, budget)
    for rows, after in pairwise(plan):
        assert (len(rows) + 1) * lengths[rows[0]] > budget
        assert lengths[rows[-1]] >= lengths[after[0]]


@given(st.lists(lengths_of, min_size=1, max_size=4), budgets)
def test_ranks_agree_on_the_number(all_lengths: list[list[int]], budget: int) -> None:
    number = num_microbatches(all_lengths, budget)
    needed = [len(microbatches(lengths, budget)) for lengths in all_lengths]
    assert number == max(1, *needed, 0)


def test_by_hand() -> None:
    assert microbatches([3, 9, 4, 4, 20], 12) == [[4], [1], [2, 3, 0]]
    assert num_microbatches([[], []], 12) == 1


def test_torch_is_not_imported() -> None:
    code = (
        "import sys; import arealite.algo.packing, arealite.algo.reduction, "
        "arealite.algo.advantages, arealite.algo.schedules; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
