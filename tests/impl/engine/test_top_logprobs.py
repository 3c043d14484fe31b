"""Logprobs of top ids and of truncated samplers in the engine: equality with plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from arealite.algo.logprobs import NO_LOGPROB
from arealite.api.engine import LossInput, Sequence
from arealite.api.engine_config import LoRAConfig
from tests.impl.engine.helpers import (
    CENTERED,
    LOSS,
    add_top_ids,
    assert_close,
    gradients,
    make_engine,
    make_rows,
)

pytestmark = pytest.mark.usefixtures("group")
LAYOUTS = pytest.mark.parametrize("layout", ["padded", "packed"])


def rows_with_top_ids(size: int, truncated: float = 0.0) -> list[Sequence]:
    rows = make_rows()
    add_top_ids(rows, size=size, truncated=truncated)
    return rows


def plain(model: torch.nn.Module, row: Sequence) -> dict[str, torch.Tensor]:
    """Return the outputs for one unpadded row's loss tokens by definition, token by token."""
    tokens = torch.from_numpy(row.tokens.astype(np.int64))
    logits = model(input_ids=tokens[None]).logits[0].float() / row.temperature
    assert row.top_ids is not None and row.is_truncated is not None
    logprobs, top_logprobs, entropy = [], [], []
    for position in np.flatnonzero(row.loss_mask):
        z = logits[position - 1]
        logp = torch.log_softmax(z, -1)
        entropy.append(-(logp.exp() * logp).sum())
        ids = torch.from_numpy(row.top_ids[position].astype(np.int64))
        if row.is_truncated[position]:
            hidden = torch.ones(len(z), dtype=torch.bool)
            hidden[ids[ids >= 0]] = False
            logp = torch.log_softmax(z.masked_fill(hidden, -torch.inf), -1)
        logprobs.append(logp[tokens[position]])
        nothing = torch.tensor(NO_LOGPROB)
        top_logprobs.append(torch.stack([logp[i] if i >= 0 else nothing for i in ids]))
    return {
        "logprobs": torch.stack(logprobs),
        "entropy": torch.stack(entropy),
        "top_logprobs": torch.stack(top_logprobs),
    }


@LAYOUTS
@pytest.mark.parametrize("truncated", [0.0, 0.5])
@pytest.mark.parametrize("budget", [64, 8192])
def test_forward_returns_logprobs_of_top_ids_and_of_truncated_samplers(
    model: Path, layout: str, truncated: float, budget: int
) -> None:
    rows = rows_with_top_ids(6, truncated)
    engine = make_engine(model, layout=layout, max_tokens_per_microbatch=budget)
    outputs = engine.forward(rows)
    assert set(outputs) == {"logprobs", "entropy", "top_logprobs"}
    reference = AutoModelForCausalLM.from_pretrained(model)
    for index, row in enumerate(rows):
        assert row.top_ids is not None
        top_logprobs = outputs["top_logprobs"][index]
        assert top_logprobs.shape == row.top_ids.shape
        assert not top_logprobs[~row.loss_mask].any()
        with torch.no_grad():
            expected = plain(reference, row)
        is_none = (row.top_ids < 0)[row.loss_mask]
        for name, values in expected.items():
            got = outputs[name][index][row.loss_mask]
            if name == "top_logprobs":
                assert (got[is_none] < -9000).all()
                got, values = got[~is_none], values[~is_none]
            np.testing.assert_allclose(got, values, atol=1e-5, rtol=1e-5)


def test_rows_without_top_ids_have_no_such_output_and_a_value_head_ignores_them(
    model: Path,
) -> None:
    assert set(make_engine(model).forward(make_rows())) == {"logprobs", "entropy"}
    critic = make_engine(model, head="value")
    with_ids = critic.forward(rows_with_top_ids(4, 0.5))["values"]
    without = critic.forward(make_rows())["values"]
    assert all(np.array_equal(*pair) for pair in zip(with_ids, without, strict=True))


def plain_gradients(path: Path, rows: list[Sequence]) -> tuple[dict[str, torch.Tensor], float]:
    """Return the gradients of CENTERED through plain transformers, and the loss."""
    reference = AutoModelForCausalLM.from_pretrained(path)
    total = torch.zeros(())
    for row in rows:
        fields = {k: torch.from_numpy(v[row.loss_mask]) for k, v in row.fields.items()}
        zeros = torch.zeros(int(row.loss_mask.sum()), dtype=torch.int64)
        loss, _ = CENTERED(LossInput(outputs=plain(reference, row), rows_N=zeros, fields=fields))
        total = total + loss
    total.backward()
    found = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    return found, float(total.detach())


@LAYOUTS
@pytest.mark.parametrize(("size", "truncated"), [(64, 0.0), (5, 0.0), (8, 0.5)])
def test_centred_gradients_equal_autograd(
    model: Path, layout: str, size: int, truncated: float
) -> None:
    """64 are all ids of the model."""
    expected, loss = plain_gradients(model, rows_with_top_ids(size, truncated))
    for budget in (64, 8192):
        engine = make_engine(model, layout=layout, max_tokens_per_microbatch=budget)
        got, stats = gradients(engine, rows_with_top_ids(size, truncated))
        assert_close(got, expected)
        assert stats["loss"] == pytest.approx(loss, abs=1e-5)
        assert (stats["centering_tail"] > 0.01) == (size < 64)


def test_sharded_model_has_the_gradients_of_autograd(model: Path) -> None:
    """FSDP2 warns, which is an error here, if an output is a view."""
    expected, _ = plain_gradients(model, rows_with_top_ids(8, 0.5))
    engine = make_engine(model, cpu_offload=True)
    assert_close(gradients(engine, rows_with_top_ids(8, 0.5))[0], expected)


def test_packed_rows_and_adapters_have_the_gradients_of_padded_rows(model: Path) -> None:
    found = []
    for layout in ("padded", "packed"):
        engine = make_engine(model, layout=layout, lora=LoRAConfig(rank=4))
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad and not parameter.any():
                generator = torch.Generator().manual_seed(len(name))
                parameter.data.normal_(std=0.1, generator=generator)
        found.append(gradients(engine, rows_with_top_ids(6, 0.3))[0])
    assert_close(*found, tolerance=1e-6)


@LAYOUTS
def test_loss_without_centering_is_equal_bit_for_bit_with_top_ids(model: Path, layout: str) -> None:
    found: list[dict[str, torch.Tensor]] = []
    stats: list[dict[str, Any]] = []
    for rows in (make_rows(), rows_with_top_ids(6)):
        engine = make_engine(model, layout=layout)
        gradient, stat = gradients(engine, rows, LOSS)
        found.append(gradient)
        stats.append(stat)
    assert stats[0] == stats[1]
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name


def test_recorded_top_logprobs_equal_a_forward_before_the_update(model: Path) -> None:
    rows = rows_with_top_ids(6, 0.3)
    engine = make_engine(model)
    outputs = engine.forward(rows)
    record_outputs = {"logprobs": "prox_logprobs", "top_logprobs": "prox_top_logprobs"}
    engine.train_batch(rows, CENTERED, record_outputs=record_outputs)
    for name, field in record_outputs.items():
        for row, values in zip(rows, outputs[name], strict=True):
            np.testing.assert_allclose(row.fields[field], values, atol=1e-5)


def test_micro_batch_may_have_rows_without_top_ids(model: Path) -> None:
    rows = rows_with_top_ids(6)
    rows[3].top_ids = None
    rows[3].is_truncated = None
    outputs = make_engine(model, max_tokens_per_microbatch=8192).forward(rows)
    top_logprobs = outputs["top_logprobs"][3][rows[3].loss_mask]
    assert top_logprobs.shape[1] == 6 and (top_logprobs == NO_LOGPROB).all()
