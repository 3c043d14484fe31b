"""forward_backward adds gradients, optim_step applies them, and train_batch is both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from arealite.api.engine import LossInput
from arealite.api.engine_config import LoRAConfig, OptimizerConfig
from arealite.base.errors import UserError
from arealite.impl.engine import fsdp
from arealite.impl.engine.fsdp import FSDPEngine
from tests.impl.engine.helpers import (
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

KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "packed": {"layout": "packed"},
    "recomputed": {"gradient_checkpointing": True},
    "sharded": {"cpu_offload": True},
    "lora": {"lora": LoRAConfig(rank=4)},
    "value": {"head": "value"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
}


def engine_of(model: Path, kind: str) -> FSDPEngine:
    sgd = {"type": "sgd", "clip_grad_norm": 0.0}
    return make_engine(model, max_tokens_per_microbatch=48, optimizer=sgd, **KINDS[kind])


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("kind", KINDS)
def test_train_batch_equals_its_steps_written_out_bit_for_bit(kind: str, model: Path) -> None:
    rows = make_rows()
    engine = engine_of(model, kind)
    plain = engine_of(model, kind)
    loss_fn = loss_of(engine)
    for _ in range(2):
        stats = engine.train_batch(rows, loss_fn)
        loss = 0.0
        with plain._low_precision():
            for indices in plain._plan(rows):
                batch = plain._collate([rows[index] for index in indices], "")
                outputs = plain._compute(batch)
                part, part_stats = loss_fn(
                    LossInput(outputs=outputs, rows_N=batch.rows_N, fields=batch.fields)
                )
                (part * plain.optimizer.scale.value).backward()
                loss += float(part_stats["loss"])
        outcome = plain.optimizer.step()
        assert {name: stats[name] for name in outcome} == outcome
        assert stats["loss"] == pytest.approx(loss)
        assert stats["microbatches"] > 2
        assert equal(weights(engine), weights(plain))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_several_calls_equal_those_of_one(kind: str, model: Path) -> None:
    rows = make_rows()
    whole, _ = gradients(engine_of(model, kind), rows)
    engine = engine_of(model, kind)
    sums = dict[str, float]()
    for part in (rows[:5], rows[5:6], []):
        for name, stat in engine.forward_backward(part, loss_of(engine)).items():
            sums[name] = sums.get(name, 0.0) + stat
    added, stats = gradients(engine, rows[6:])
    assert_close(added, whole, tolerance=2e-2 if "16" in kind else 1e-5)
    assert sums["tokens"] + stats["tokens"] == sum(len(row.tokens) for row in rows)


@pytest.mark.parametrize("kind", KINDS)
def test_failed_call_leaves_no_gradient_to_the_next_update(kind: str, model: Path) -> None:
    rows = make_rows()
    engine = engine_of(model, kind)
    fresh = engine_of(model, kind)
    loss_fn = loss_of(engine)
    num_calls = 0

    def fail_in_the_third(batch: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise ZeroDivisionError
        return loss_fn(batch)

    engine.forward_backward(rows, loss_fn)
    with pytest.raises(ZeroDivisionError):
        engine.forward_backward(rows, fail_in_the_third)
    assert num_calls == 3
    with pytest.raises(UserError, match="there is no gradient"):
        engine.optim_step()
    assert engine.train_batch(rows, loss_fn) == fresh.train_batch(rows, loss_fn)
    assert equal(weights(engine), weights(fresh))


@pytest.mark.parametrize("kind", ["float32", "sharded", "bfloat16"])
@pytest.mark.parametrize("place", ["outputs", "first layer"])
def test_failure_inside_a_backward_pass_leaves_no_gradient(
    model: Path, monkeypatch: pytest.MonkeyPatch, kind: str, place: str
) -> None:
    """In the first layer, the parameters above it have a gradient already."""
    rows = make_rows()
    engine = engine_of(model, kind)
    fresh = engine_of(model, kind)
    layers = [part for name, part in engine.module.named_modules() if name.endswith("layers.0")]

    def fail(gradient: torch.Tensor) -> None:
        raise KeyboardInterrupt

    def fail_behind(layer: torch.nn.Module, inputs: Any, output: Any) -> None:
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        hidden.register_hook(fail)

    def interrupted(*args: Any, **options: Any) -> Any:
        outputs = args[0](args[1])
        if place == "outputs":
            outputs["logprobs"].register_hook(fail)
        outputs["logprobs"].sum().backward()

    with monkeypatch.context() as patched:
        patched.setattr(fsdp, "backward", interrupted)
        hook = layers[0].register_forward_hook(fail_behind) if place == "first layer" else None
        with pytest.raises(KeyboardInterrupt):
            engine.forward_backward(rows, LOSS)
        if hook is not None:
            hook.remove()
    assert engine.train_batch(rows, LOSS) == fresh.train_batch(rows, LOSS)
    assert equal(weights(engine), weights(fresh))


@pytest.mark.parametrize("kind", ["float32", "sharded"])
def test_failure_before_the_first_pass_is_raised_as_it_is(model: Path, kind: str) -> None:
    rows = make_rows()
    rows[0].temperature = 0.0
    engine = engine_of(model, kind)
    with pytest.raises(UserError, match="temperature"):
        engine.forward_backward(rows, LOSS)
    assert engine.train_batch(make_rows(), LOSS) == engine_of(model, kind).train_batch(
        make_rows(), LOSS
    )


def test_update_without_a_gradient_is_refused_and_changes_nothing(model: Path) -> None:
    engine = make_engine(model)
    before = engine.fingerprint()
    with pytest.raises(UserError, match="Call forward_backward before it"):
        engine.optim_step()
    engine.train_batch(make_rows(), LOSS)
    assert engine.optimizer.updates == 1
    with pytest.raises(UserError, match="Call forward_backward before it"):
        engine.optim_step()
    assert engine.optimizer.updates == 1
    assert engine.fingerprint() != before


def test_given_learning_rate_replaces_that_of_the_schedule(model: Path) -> None:
    rows = make_rows()
    schedule = {"schedule": "linear", "warmup_steps": 5, "weight_decay": 0.0, "type": "sgd"}
    engine = make_engine(model, optimizer=schedule | {"beta1": 0.0, "clip_grad_norm": 0.0})
    before = weights(engine)
    gradient, _ = gradients(engine, rows)
    engine.forward_backward(rows, LOSS)
    assert engine.optim_step(lr=0.5)["lr"] == 0.5
    for name, tensor in weights(engine).items():
        torch.testing.assert_close(tensor, before[name] - 0.5 * gradient[name])
    assert engine.train_batch(rows, LOSS)["lr"] == pytest.approx(1e-2 * 2 / 5)


def test_options_of_a_step_apply_from_then_on(model: Path) -> None:
    rows = make_rows()
    options = {"beta1": 0.5, "beta2": 0.7, "eps": 1e-3, "weight_decay": 0.1, "clip_grad_norm": 0.05}
    engine = make_engine(model)
    fresh = make_engine(model, optimizer=options)
    config = OptimizerConfig(**options)
    for optimizer in (config, None):
        engine.forward_backward(rows, LOSS)
        fresh.forward_backward(rows, LOSS)
        stats = engine.optim_step(lr=0.1, optimizer=optimizer)
        assert stats == fresh.optim_step(lr=0.1)
        assert equal(weights(engine), weights(fresh))
    engine.forward_backward(rows, LOSS)
    with pytest.raises(UserError, match=r"optimizer\.type=sgd: it is adamw"):
        engine.optim_step(optimizer=OptimizerConfig(type="sgd"))


def test_loading_a_checkpoint_drops_the_gradient(model: Path, tmp_path: Path) -> None:
    engine = make_engine(model)
    engine.train_batch(make_rows(), LOSS)
    save(engine, tmp_path / "step-1", {"step": 1})
    engine.forward_backward(make_rows(), LOSS)
    load(engine, tmp_path / "step-1")
    with pytest.raises(UserError, match="there is no gradient"):
        engine.optim_step()
