"""Weights of task classes by their learnability."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.ext.curriculum.task_weights import learnability, success_rate

SHARES = st.lists(st.floats(0, 1), max_size=50)


@given(SHARES)
def test_success_rate_is_between_0_and_1_and_one_half_without_data(shares: list[float]) -> None:
    assert 0 < success_rate(shares) < 1
    assert success_rate([]) == 0.5
    assert success_rate([1.0, 0.0]) == 0.5
    assert success_rate([1.0] * 8) == pytest.approx(0.9)


@given(st.floats(0, 1), st.floats(0.01, 1))
def test_learnability_is_between_floor_and_1_and_symmetric(rate: float, floor: float) -> None:
    got = learnability(rate, floor=floor)
    assert floor - 1e-9 <= got <= 1 + 1e-9
    assert got == pytest.approx(learnability(1 - rate, floor=floor))


def test_learnability_matches_values_by_hand() -> None:
    assert learnability(0.5, floor=0.1) == 1.0
    assert learnability(1.0, floor=0.1) == pytest.approx(0.1)
    assert learnability(0.75, floor=0.2) == pytest.approx(0.2 + 0.8 * 0.75)
    assert learnability(0.9, floor=1.0) == 1.0, "even"
