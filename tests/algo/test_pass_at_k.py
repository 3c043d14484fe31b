"""pass@k against all ways to draw, and intervals that hold what they promise."""

from __future__ import annotations

import math
import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.algo.pass_at_k import default_ks, mean_of_tasks, mean_pass_at_k, pass_at_k


@given(
    st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))
)
def test_it_is_the_share_of_all_draws_with_a_right_one(drawn: tuple[int, int, int]) -> None:
    n, c, k = drawn
    draws = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@given(st.integers(1, 200), st.data())
def test_more_draws_and_more_right_ones_never_lower_it(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    value = pass_at_k(n, c, k)
    assert 0.0 <= value <= 1.0
    assert pass_at_k(n, c, 1) == pytest.approx(c / n)
    assert value <= pass_at_k(n, min(c + 1, n), k)
    assert value <= pass_at_k(n, c, min(k + 1, n))
    assert (value == 0.0) == (c == 0)


def test_it_has_no_bias_where_the_best_of_all_samples_has() -> None:
    """Of samples right with probability p, pass@k is 1 - (1 - p)^k on average."""
    p, n, k = 0.3, 6, 2
    mean = sum(
        math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1)
    )
    assert mean == pytest.approx(1 - (1 - p) ** k)


def test_which_k() -> None:
    assert [default_ks(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_tasks_with_too_few_samples_are_left_out() -> None:
    assert mean_pass_at_k([(4, 2), (1, 1)], 2) == mean_pass_at_k([(4, 2)], 2)
    assert mean_pass_at_k([(1, 1)], 2) is None


def test_intervals_hold_the_truth_as_often_as_promised() -> None:
    """Tasks of different difficulty, ten samples each, drawn again and again."""
    dice, held, rewarded, rounds = random.Random(1), 0, 0, 400
    for _ in range(rounds):
        tasks = [dice.random() ** 2 for _ in range(40)]  # the mean of a squared uniform is 1/3
        counts = [(10, sum(dice.random() < p for _ in range(10))) for p in tasks]
        estimate = mean_pass_at_k(counts, 1)
        assert estimate is not None
        held += estimate.low <= 1 / 3 <= estimate.high
        reward = mean_of_tasks([c / n for n, c in counts])
        rewarded += reward.low <= 1 / 3 <= reward.high
    assert held >= 0.95 * rounds
    assert 0.9 * rounds <= rewarded <= 0.99 * rounds


def test_intervals_at_the_ends_are_no_points() -> None:
    none, all_ = mean_pass_at_k([(1, 0)] * 10, 1), mean_pass_at_k([(1, 1)] * 10, 1)
    assert none is not None and all_ is not None
    assert (none.mean, none.low) == (0.0, 0.0)
    assert 0.2 < none.high < 0.35
    assert (all_.mean, all_.high) == (1.0, pytest.approx(1.0))
    assert all_.low == pytest.approx(1.0 - none.high)
    assert mean_of_tasks([1.0]) == (1.0, -math.inf, math.inf)
