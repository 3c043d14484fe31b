"""Learning-rate schedules at their boundaries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.api.engine_config import OptimizerConfig
from arealite.impl.engine.optimizer import learning_rate


def curve(total: int, **options: object) -> list[float]:
    config = OptimizerConfig(**options)  # type: ignore[arg-type]
    return [learning_rate(u, lr=1.0, total=total, config=config) for u in range(total + 2)]


def test_constant_schedule_after_warmup() -> None:
    assert curve(5, schedule="constant", warmup_steps=4)[:6] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_and_cosine_schedules_end_at_min_lr_ratio() -> None:
    linear = curve(6, schedule="linear", warmup_steps=1, min_lr_ratio=0.2)
    assert linear == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])
    cosine = curve(6, schedule="cosine", warmup_steps=1)
    assert cosine == pytest.approx([1.0, 1.0, 0.853553, 0.5, 0.146447, 0.0, 0.0, 0.0], abs=1e-6)


@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(0, 20), st.floats(0, 1))
def test_schedule_stays_within_bounds_and_never_rises_after_warmup(
    kind: str, warmup: int, ratio: float
) -> None:
    values = curve(15, schedule=kind, warmup_steps=warmup, min_lr_ratio=ratio)
    assert all(0.0 < v <= 1.0 + 1e-12 or (ratio == 0.0 and v >= 0.0) for v in values if v != ratio)
    assert all(a >= b - 1e-12 for a, b in zip(values[warmup:], values[warmup + 1 :], strict=False))
