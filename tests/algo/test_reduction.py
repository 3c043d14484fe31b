"""Compare token weights with the reductions they implement."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.algo.reduction import token_weights
from arealite.base.errors import UserError

row_values = st.lists(
    st.lists(st.floats(-5, 5, allow_nan=False), max_size=6), min_size=1, max_size=8
)


def weighted_sum(kind: str, rows: list[list[float]], divisor: float | None = None) -> float:
    weights = token_weights(kind, [len(row) for row in rows], divisor=divisor)
    return sum(w * value for w, row in zip(weights, rows, strict=True) for value in row)


@given(row_values)
def test_token_weights_implement_each_reduction(rows: list[list[float]]) -> None:
    full = [row for row in rows if row]
    if not full:
        assert token_weights("token_mean", [0] * len(rows)) == [0.0] * len(rows)
        return
    tokens = [value for row in full for value in row]
    assert weighted_sum("token_mean", rows) == pytest.approx(sum(tokens) / len(tokens))
    by_row = sum(sum(row) / len(row) for row in full) / len(full)
    assert weighted_sum("seq_mean_token_mean", rows) == pytest.approx(by_row)
    constant = sum(sum(row) / 16.0 for row in full) / len(full)
    assert weighted_sum("seq_mean_token_sum", rows, 16.0) == pytest.approx(constant)


def test_errors_name_the_fix() -> None:
    with pytest.raises(UserError, match="divisor above 0"):
        token_weights("seq_mean_token_sum", [1])
