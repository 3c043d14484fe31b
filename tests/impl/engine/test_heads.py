"""Frozen engines, and engines with a value head (one number per token)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from arealite.api.engine import LossInput, Sequence
from arealite.api.engine_config import FSDPConfig
from arealite.base.errors import InvariantError, UserError
from arealite.impl.engine.fsdp import FSDPEngine
from tests.impl.engine.helpers import (
    LOSS,
    load,
    make_engine,
    make_rows,
    save,
    to_advantages,
    weights,
)

pytestmark = pytest.mark.usefixtures("group")


def frozen(model: Path, **config: object) -> FSDPEngine:
    return FSDPEngine(FSDPConfig(**config), model_path=str(model), seed=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frozen_engine_computes_the_same_outputs(model: Path, dtype: str) -> None:
    rows = make_rows()
    engine = frozen(model, dtype=dtype)
    got = engine.forward(rows)
    expected = make_engine(model, dtype=dtype).forward(rows)
    for name in ("logprobs", "entropy"):
        assert all(np.array_equal(a, b) for a, b in zip(got[name], expected[name], strict=True))
    assert not any(param.requires_grad for param in engine.module.parameters())
    with pytest.raises(InvariantError, match="frozen"):
        engine.train_batch(rows, LOSS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_start_at_zero_and_learn(model: Path, dtype: str) -> None:
    rows = make_rows()
    for row in rows:
        row.fields["advantages"] = row.tokens.astype(np.float32) / 32
    engine = make_engine(model, head="value", dtype=dtype)
    assert not any(values.any() for values in engine.forward(rows)["values"])
    losses = [engine.train_batch(rows, to_advantages)["loss"] for _ in range(20)]
    assert losses[-1] < 0.7 * losses[0]
    values = engine.forward(rows)["values"]
    assert all(value.dtype == np.float32 for value in values)
    assert not any(value[~row.loss_mask].any() for value, row in zip(values, rows, strict=True))


def test_value_belongs_to_the_state_before_the_token(untied: Path, tmp_path: Path) -> None:
    engine, rows = make_engine(untied, head="value"), make_rows()
    for _ in range(5):
        engine.train_batch(rows, to_advantages)
    engine.export(tmp_path / "export")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "export")
    assert loaded.config.num_labels == 1
    tokens = torch.arange(3, 12)
    with torch.no_grad():
        expected = [float(loaded(input_ids=tokens[None, :n]).logits) for n in range(1, 9)]
    row = Sequence(
        tokens=tokens.numpy().astype(np.int32), loss_mask=np.arange(9) > 0, temperature=1.0
    )
    (values,) = engine.forward([row])["values"]
    assert np.abs(values[1:]).min() > 1e-3
    np.testing.assert_allclose(values[1:], expected, atol=1e-5)
    (again,) = make_engine(tmp_path / "export", head="value").forward([row])["values"]
    np.testing.assert_array_equal(again, values)


def test_resumed_critic_is_bitwise_equal(model: Path, tmp_path: Path) -> None:
    rows = make_rows()
    engine, other = make_engine(model, head="value"), make_engine(model, head="value")
    engine.train_batch(rows, to_advantages)
    save(engine, tmp_path / "step-1", {"step": 1})
    load(other, tmp_path / "step-1")
    for each in (engine, other):
        each.train_batch(rows, to_advantages)
    assert engine.fingerprint() == other.fingerprint()
    assert "score.weight" in weights(engine)


def test_shard_size_that_does_not_divide_the_ranks_is_refused(model: Path) -> None:
    with pytest.raises(UserError, match="shard_size 2 does not divide the 1 trainer ranks"):
        frozen(model, shard_size=2)


@pytest.mark.parametrize("budget", [1, 64, 8192])
def test_rows_of_one_example_stay_in_one_micro_batch(model: Path, budget: int) -> None:
    rows = make_rows(12)
    for number, row in enumerate(rows):
        row.fields["number"] = np.full(len(row.tokens), number, np.float32)
    seen: list[tuple[int, int]] = []

    def look(batch: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        numbers = batch.fields["number"]
        for row in batch.rows_N.unique().tolist():
            seen.append((row % 2, int(numbers[batch.rows_N == row][0])))
        return batch.outputs["logprobs"].sum(), {}

    engine = make_engine(model, max_tokens_per_microbatch=budget)
    engine.train_batch(rows, look, rows_per_example=2)
    assert sorted(number for _, number in seen) == list(range(12))
    pairs = list(zip(seen[::2], seen[1::2], strict=True))
    assert all(a == (0, b[1] - 1) and b == (1, a[1] + 1) for a, b in pairs)
