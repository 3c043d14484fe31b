"""pass@k compared with all possible draws, and coverage of its intervals."""

from __future__ import annotations

import math
import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.algo.pass_at_k import default_ks, mean_pass_at_k, pass_at_k
from arealite.ext.evaluation.evaluate import mean_of_tasks


@given(
    st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))
)
def test_pass_at_k_is_the_share_of_draws_with_a_right_sample(drawn: tuple[int, int, int]) -> None:
    n, c, k = drawn
    draws = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@given(st.integers(1, 200), st.data())
def test_pass_at_k_is_monotonic_in_k_and_right_samples(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    value = pass_at_k(n, c, k)
    assert 0.0 <= value <= 1.0
    assert pass_at_k(n, c, 1) == pytest.approx(c / n)
    assert value <= pass_at_k(n, min(c + 1, n), k)
    assert value <= pass_at_k(n, c, min(k + 1, n))
    assert (value == 0.0) == (c == 0)


def test_pass_at_k_is_unbiased() -> None:
    """With success probability p, the mean of pass@k is 1 - (1 - p)^k."""
    p, n, k = 0.3, 6, 2
    mean = sum(
        math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1)
    )
    assert mean == pytest.approx(1 - (1 - p) ** k)


def test_default_ks_are_powers_of_2_up_to_n() -> None:
    assert [default_ks(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_tasks_with_fewer_than_k_samples_are_excluded() -> None:
    assert mean_pass_at_k([(4, 2), (1, 1)], 2) == mean_pass_at_k([(4, 2)], 2)
    assert mean_pass_at_k([(1, 1)], 2) is None


def test_intervals_have_their_nominal_coverage() -> None:
    """Draw tasks of different difficulty with ten samples each, many times."""
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


def test_intervals_at_0_and_1_have_a_positive_width() -> None:
    none, all_ = mean_pass_at_k([(1, 0)] * 10, 1), mean_pass_at_k([(1, 1)] * 10, 1)
    assert none is not None and all_ is not None
    assert (none.mean, none.low) == (0.0, 0.0)
    assert 0.2 < none.high < 0.35
    assert (all_.mean, all_.high) == (1.0, pytest.approx(1.0))
    assert all_.low == pytest.approx(1.0 - none.high)
    assert mean_of_tasks([1.0]) == (1.0, -math.inf, math.inf)
