"""The engine in one process: equality with plain transformers, and invariances."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from arealite.api.engine import LossInput, Sequence
from arealite.api.engine_config import LoRAConfig
from arealite.base.errors import InvariantError, UserError
from arealite.impl.engine import model as models
from arealite.impl.engine.optimizer import LossScale
from tests.impl.engine.helpers import (
    FIELDS,
    LOSS,
    assert_close,
    gradients,
    load,
    loss_of,
    make_engine,
    make_rows,
    save,
    weights,
)

pytestmark = pytest.mark.usefixtures("group")


def plain(model: torch.nn.Module, row: Sequence) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (logprobs, entropies) of one unpadded row's loss tokens by definition."""
    tokens = torch.from_numpy(row.tokens.astype(np.int64))
    logits = model(input_ids=tokens[None]).logits[0].float() / row.temperature
    logp = torch.log_softmax(logits, -1)
    where = torch.from_numpy(row.loss_mask[1:])
    chosen = logp[:-1].gather(1, tokens[1:, None])[:, 0][where]
    return chosen, -(logp.exp() * logp).sum(-1)[:-1][where]


@pytest.mark.parametrize("which", ["model", "untied"])
@pytest.mark.parametrize("budget", [1, 64, 8192])
def test_forward_equals_transformers(
    which: str, budget: int, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(which)
    rows = make_rows()
    engine = make_engine(path, max_tokens_per_microbatch=budget, logits_chunk=13 * 64)
    logprobs, entropies = engine.forward(rows).values()
    reference = AutoModelForCausalLM.from_pretrained(path)
    for row, logprob, entropy in zip(rows, logprobs, entropies, strict=True):
        assert logprob.shape == entropy.shape == row.tokens.shape
        assert logprob.dtype == np.float32
        assert not logprob[~row.loss_mask].any()
        with torch.no_grad():
            expected = plain(reference, row)
        np.testing.assert_allclose(logprob[row.loss_mask], expected[0], atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(entropy[row.loss_mask], expected[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("which", ["model", "untied"])
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}])
def test_gradients_equal_autograd_with_any_microbatch_budget(
    which: str, options: dict[str, bool], request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(which)
    rows = make_rows()
    reference = AutoModelForCausalLM.from_pretrained(path)
    total = torch.zeros(())
    for row in rows:
        logprobs, entropy = plain(reference, row)
        mask = row.loss_mask
        fields = {k: torch.from_numpy(v[mask]) for k, v in row.fields.items()}
        zeros = torch.zeros(int(mask.sum()), dtype=torch.int64)
        total = (
            total
            + LOSS(
                LossInput(
                    outputs={"logprobs": logprobs, "entropy": entropy}, rows_N=zeros, fields=fields
                )
            )[0]
        )
    total.backward()
    loss = float(total.detach())
    expected = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    for budget in (1, 100, 8192):
        engine = make_engine(path, max_tokens_per_microbatch=budget, **options)
        got, stats = gradients(engine, rows)
        assert_close(got, expected)
        assert stats["loss"] == pytest.approx(loss, abs=1e-6)
        assert stats["weight"] == pytest.approx(1.0)
        assert stats["tokens"] == sum(len(row.tokens) for row in rows)


def test_update_raises_logprobs_of_rows_with_positive_advantages(model: Path) -> None:
    rows = make_rows(temperature=1.0)
    for row in rows:
        row.fields["advantages"][:] = 1.0
    engine = make_engine(model)
    before = engine.forward(rows)["logprobs"]
    for row, logprob in zip(rows, before, strict=True):
        row.fields["prox_logprobs"] = row.fields["behav_logprobs"] = logprob
    stats = engine.train_batch(rows, LOSS)
    assert stats["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert stats["approx_kl"] == pytest.approx(0.0, abs=1e-5)
    assert stats["skipped_update"] == 0.0
    assert stats["lr"] == 1e-2
    after = engine.forward(rows)["logprobs"]
    assert sum(a.sum() for a in after) > sum(b.sum() for b in before) + 10


def test_recorded_outputs_of_an_update_equal_a_forward_before_it(model: Path) -> None:
    rows, noted = make_rows(), make_rows()
    engine = make_engine(model)
    said = engine.forward(rows)
    for row in noted:
        del row.fields["prox_logprobs"]
    record_outputs = {"logprobs": "prox_logprobs", "entropy": "entropy"}
    stats = engine.train_batch(noted, LOSS, record_outputs=record_outputs)
    assert stats["ratio"] == pytest.approx(stats["weight"], abs=1e-6)
    for name, field in record_outputs.items():
        for row, values_T in zip(noted, said[name], strict=True):
            np.testing.assert_allclose(row.fields[field], values_T, atol=1e-5)


def test_non_finite_gradient_skips_the_update(model: Path) -> None:
    rows = make_rows()
    engine = make_engine(model)
    before = weights(engine)
    bad = make_rows()
    bad[3].fields["advantages"][:] = np.nan
    stats = engine.train_batch(bad, LOSS)
    assert stats["skipped_update"] == 1.0
    assert not np.isfinite(stats["grad_norm"])
    after = weights(engine)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert engine.train_batch(rows, LOSS)["skipped_update"] == 0.0


@pytest.mark.parametrize("limit", [0, 2])
def test_too_many_consecutive_skipped_updates_raise_an_error(limit: int, model: Path) -> None:
    engine, rows = make_engine(model, optimizer={"max_skipped_updates": limit}), make_rows()
    bad = make_rows()
    bad[0].fields["advantages"][:] = np.nan

    def skipped(batch: list[Sequence]) -> float:
        return engine.train_batch(batch, LOSS)["skipped_update"]

    assert [skipped(batch) for batch in (bad, rows, bad)] == [1.0, 0.0, 1.0]  # no two in a row
    if not limit:
        assert [skipped(bad) for _ in range(9)] == [1.0] * 9
        return
    says = r"2 updates in a row were skipped, after 1 applied ones: the gradient norm is .*finite"
    with pytest.raises(InvariantError, match=says):
        skipped(bad)


def test_error_names_non_finite_parameters(model: Path) -> None:
    engine, rows = make_engine(model, optimizer={"max_skipped_updates": 1}), make_rows()
    with torch.no_grad():
        engine.module.get_decoder().norm.weight[0] = torch.nan
    with pytest.raises(InvariantError, match=r"as model\.norm\.weight"):
        engine.train_batch(rows, LOSS)


def test_gradients_are_clipped_by_their_global_norm(model: Path) -> None:
    rows = make_rows()
    engine = make_engine(model, optimizer={"clip_grad_norm": 1e-3})
    full, _ = gradients(engine, rows)
    norm = float(torch.stack([g.square().sum() for g in full.values()]).sum().sqrt())
    assert norm > 1e-3
    seen: list[float] = []
    parameters = [*engine.module.parameters()]
    assert engine._optimizer is not None
    engine._optimizer._torch.register_step_pre_hook(
        lambda *_: seen.append(
            sum(float(p.grad.square().sum()) for p in parameters if p.grad is not None) ** 0.5
        )
    )
    stats = engine.train_batch(rows, LOSS)
    assert stats["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert seen == [pytest.approx(1e-3, rel=1e-4)]


def test_weight_decay_applies_only_to_matrices(model: Path) -> None:
    rows = make_rows()
    for row in rows:
        row.fields["loss_weight"][:] = 0.0
    engine = make_engine(model, optimizer={"weight_decay": 0.5})
    before = weights(engine)
    engine.train_batch(rows, LOSS)
    for name, tensor in weights(engine).items():
        shrunk = before[name] * (1 - 0.5 * 1e-2 * (tensor.ndim > 1))
        torch.testing.assert_close(tensor, shrunk, rtol=1e-6, atol=1e-8)


def test_bfloat16_engine_keeps_float32_master_weights(model: Path) -> None:
    rows = make_rows()
    low, full = make_engine(model, dtype="bfloat16"), make_engine(model)
    for engine in (low, full):
        assert all(p.dtype == torch.float32 for p in engine._model.parameters())
    theirs = full.forward(rows)["logprobs"]
    ours = low.forward(rows)["logprobs"]
    worst = max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))
    assert 0.0 < worst < 0.1
    assert low.train_batch(rows, LOSS)["skipped_update"] == 0.0
    assert all(tensor.dtype == torch.bfloat16 for tensor in weights(low).values())


@pytest.mark.parametrize("option", [{}, {"gradient_checkpointing": True}, {"head": "value"}])
def test_16_bit_copies_on_one_rank_train_like_sharded_parameters(
    model: Path, option: dict[str, Any]
) -> None:
    rows = make_rows()
    options: dict[str, Any] = {"dtype": "bfloat16", "max_tokens_per_microbatch": 64} | option
    whole = make_engine(model, optimizer={"type": "sgd"}, **options)
    sharded = make_engine(model, optimizer={"type": "sgd"}, cpu_offload=True, **options)
    assert not models.fsdp_modules(whole._model)
    assert models.fsdp_modules(sharded._model)
    for _ in range(2):
        for engine in (whole, sharded):
            assert engine.train_batch(rows, loss_of(engine))["grad_norm"] > 0
    theirs = sharded.module.state_dict()
    for name, tensor in whole.module.state_dict().items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, theirs[name].full_tensor(), rtol=1e-6, atol=1e-6)


def test_engine_errors_name_the_fix(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing.*cannot build a lm model from config\.json"):
        make_engine(tmp_path / "nothing")
    with pytest.raises(UserError, match="Unknown dtype 'fp8'"):
        make_engine(model, dtype="fp8")
    rows = [
        Sequence(
            tokens=np.arange(4, dtype=np.int32),
            loss_mask=np.array([0, 0, 1, 1], bool),
            temperature=0.0,
        )
    ]
    with pytest.raises(UserError, match="temperature must be above 0"):
        make_engine(model).forward(rows)


def test_rows_without_loss_tokens_change_no_weights(model: Path) -> None:
    engine = make_engine(model, optimizer={"weight_decay": 0.0})
    before = weights(engine)
    silent = make_rows(3)
    for row in silent:
        row.loss_mask[:] = False
    logprobs = engine.forward(silent)["logprobs"]
    assert not any(values.any() for values in logprobs)
    assert engine.forward([]) == {"logprobs": [], "entropy": []}
    assert engine.train_batch(silent, LOSS)["grad_norm"] == 0.0
    assert engine.train_batch([], LOSS)["grad_norm"] == 0.0
    after = weights(engine)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert set(FIELDS) < set(silent[0].fields)


def random_states() -> tuple[object, str, list[int]]:
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()


def test_training_is_deterministic_and_draws_no_random_numbers(model: Path) -> None:
    """Random draws would make a resumed run or a replay differ."""
    rows, seen = make_rows(), set()
    for seed in (0, 1):
        engine = make_engine(model, seed=seed, max_tokens_per_microbatch=64)
        before = random_states()
        for _ in range(3):
            engine.forward(rows)
            engine.train_batch(rows, LOSS)
        assert random_states() == before
        seen.add(engine.fingerprint())
    assert len(seen) == 1


@pytest.mark.parametrize("lora", [0, 4])
def test_float16_trains_as_float32_within_rounding(lora: int, model: Path) -> None:
    rows, adapters = make_rows(), LoRAConfig(rank=lora)
    sgd = {"type": "sgd", "clip_grad_norm": 0.0}
    low = make_engine(model, dtype="float16", lora=adapters, optimizer=sgd)
    full = make_engine(model, lora=adapters, optimizer=sgd)

    def loss(batch: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return (batch.outputs["logprobs"] * batch.fields["loss_weight"]).sum(), {}

    for _ in range(2):
        expected, _ = gradients(full, rows, loss)
        found, _ = gradients(low, rows, loss)
        scaled = {name: gradient / 2.0**16 for name, gradient in found.items()}
        assert_close(scaled, expected, tolerance=6e-3)
        stats = low.train_batch(rows, loss)
        theirs = full.train_batch(rows, loss)
        assert stats["loss_scale"] == 2.0**16
        assert stats["skipped_update"] == 0.0
        assert stats["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-3)
    pairs = zip(*(e.forward(rows)["logprobs"] for e in (low, full)), strict=True)
    assert max(float(np.abs(a - b).max()) for a, b in pairs) < 0.02
    assert {tensor.dtype for tensor in weights(low).values()} == {torch.float16}


def test_float16_overflow_halves_the_loss_scale_and_is_no_failure(
    model: Path, tmp_path: Path
) -> None:
    limit, rows = {"max_skipped_updates": 1, "weight_decay": 0.0}, make_rows()
    engine = make_engine(model, dtype="float16", optimizer=limit)
    for row in rows:
        row.fields["loss_weight"] *= 1e4
    before, scales = weights(engine), list[float]()
    while (stats := engine.train_batch(rows, LOSS))["skipped_update"]:
        scales.append(stats["loss_scale"])
        assert all(torch.equal(before[name], tensor) for name, tensor in weights(engine).items())
    assert scales == [2.0**16 / 2**i for i in range(len(scales))]
    assert len(scales) > 2
    assert stats["loss_scale"] == scales[-1] / 2
    assert engine.optimizer.updates == 1
    save(engine, tmp_path / "step-1", {"step": 1})
    other = make_engine(model, dtype="float16", optimizer=limit)
    load(other, tmp_path / "step-1")
    assert (other.optimizer.scale.value, other.optimizer.scale.clean) == (scales[-1] / 2, 1)


def test_loss_scale_grows_after_finite_updates_and_stops_at_one() -> None:
    scale = LossScale(enabled=True)
    assert not any(scale.update(finite=True) for _ in range(2000))
    assert scale.value == 2.0**17
    assert [scale.update(finite=False) for _ in range(18)] == [True] * 17 + [False]
    assert scale.value == 1.0


def test_broken_float16_parameters_end_in_an_error(model: Path) -> None:
    limit = {"max_skipped_updates": 2}
    engine, rows = make_engine(model, dtype="float16", optimizer=limit), make_rows()
    with torch.no_grad():
        engine.module.get_decoder().norm.weight[0] = torch.nan
    with pytest.raises(InvariantError, match=r"as model\.norm\.weight"):
        for _ in range(20):
            engine.train_batch(rows, LOSS)
    assert engine.optimizer.scale.value == 1.0
