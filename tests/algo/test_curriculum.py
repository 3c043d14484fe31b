"""Classes are weighed by what is left to learn in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.algo.curriculum import learnability, success_rate

SHARES = st.lists(st.floats(0, 1), max_size=50)


@given(SHARES)
def test_a_rate_is_never_certain_and_unknown_at_one_half(shares: list[float]) -> None:
    assert 0 < success_rate(shares) < 1
    assert success_rate([]) == 0.5
    assert success_rate([1.0, 0.0]) == 0.5
    assert success_rate([1.0] * 8) == pytest.approx(0.9)


@given(st.floats(0, 1), st.floats(0.01, 1))
def test_weights_are_within_floor_and_one_and_symmetric(rate: float, floor: float) -> None:
    got = learnability(rate, floor=floor)
    assert floor - 1e-9 <= got <= 1 + 1e-9
    assert got == pytest.approx(learnability(1 - rate, floor=floor))


def test_weights_by_hand() -> None:
    assert learnability(0.5, floor=0.1) == 1.0
    assert learnability(1.0, floor=0.1) == pytest.approx(0.1)
    assert learnability(0.75, floor=0.2) == pytest.approx(0.2 + 0.8 * 0.75)
    assert learnability(0.9, floor=1.0) == 1.0, "even"
