"""Several adapters on one engine: each is trained as if it were alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from arealite.api.engine import LossInput, NewAdapter, Sequence, TrainedWeights, Training
from arealite.api.engine_config import LoRAConfig, OptimizerConfig
from arealite.base.errors import UserError
from arealite.ext.models import lora
from arealite.ext.models.named_adapter import NamedAdapter
from arealite.impl.engine.fsdp import FSDPEngine
from tests.fakes.peft_adapters import theirs_warns, write_peft_adapter
from tests.impl.engine.helpers import LOSS, make_engine, make_rows
from tests.models import tiny_model

pytestmark = pytest.mark.usefixtures("group")

TRAINING = Training(
    optimizer=OptimizerConfig(warmup_steps=0, weight_decay=0.1), lr=1e-2, total_updates=10
)
ADAPTERS = {
    "alice": LoRAConfig(rank=2, alpha=4.0, targets=["q_proj", "v_proj"]),
    "bob": LoRAConfig(rank=4, alpha=16.0, targets=["all-linear"]),
    "carol": LoRAConfig(rank=8, alpha=8.0, targets=["down_proj", "o_proj"]),
}
NAMES = [*ADAPTERS]
Tensors = dict[str, torch.Tensor]


def new(name: str, **changes: Any) -> NewAdapter:
    seed = changes.pop("seed", NAMES.index(name) if name in NAMES else 0)
    config = changes.pop("config", ADAPTERS.get(name, LoRAConfig(rank=4)))
    return NewAdapter(name=name, config=config, training=TRAINING, seed=seed, **changes)


def frozen_base(model: Path, *, mixed: bool = True, **config: Any) -> FSDPEngine:
    return make_engine(model, lora=LoRAConfig(only_named=True, mixed=mixed), **config)


def add(engine: FSDPEngine, *names: str, moved: bool = True) -> dict[str, NamedAdapter]:
    """Add adapters; `moved`: with random matrices B, which are 0 at first."""
    adapters = dict[str, NamedAdapter]()
    for name in names:
        adapter = engine.add_adapter(new(name))
        assert isinstance(adapter, NamedAdapter)
        adapters[name] = adapter
        generator = torch.Generator().manual_seed(NAMES.index(name))
        for key, param in params_of(adapter).items():
            if moved and ".lora_B." in key:
                param.data.normal_(0.0, 0.2, generator=generator)
    return adapters


def params_of(weights: TrainedWeights) -> dict[str, nn.Parameter]:
    assert isinstance(weights, NamedAdapter)
    return dict(weights.optimizer.parameters)


def gradients(adapter: NamedAdapter) -> Tensors:
    found = Tensors()
    for name, param in params_of(adapter).items():
        assert param.grad is not None, name
        found[name] = param.grad.clone()
    return found


def values(adapter: NamedAdapter) -> Tensors:
    return {name: param.detach().clone() for name, param in params_of(adapter).items()}


def assigned(names: list[str], count: int = 12) -> list[Sequence]:
    """Return rows whose adapters alternate."""
    rows = make_rows(count, temperature=1.0)
    for index, row in enumerate(rows):
        row.adapter = names[index % len(names)]
    return rows


def of(rows: list[Sequence], name: str) -> list[Sequence]:
    return [replace(row, fields={**row.fields}) for row in rows if row.adapter == name]


def assert_equal(left: Tensors, right: Tensors) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def relative(left: Tensors, right: Tensors) -> float:
    """Return the largest distance of two tensors of one name, relative to the norm of the right."""
    assert left.keys() == right.keys()
    distances = list[float]()
    for name, tensor in right.items():
        distances.append(float((left[name] - tensor).norm() / tensor.norm()))
    return max(distances)


def whole_relative(left: Tensors, right: Tensors) -> float:
    """Return the distance of two gradients, relative to the norm of the right."""
    square = sum(float((left[name] - right[name]).double().square().sum()) for name in right)
    norm_square = sum(float(tensor.double().square().sum()) for tensor in right.values())
    return (square / norm_square) ** 0.5


def assert_equal_gradients(left: Tensors, right: Tensors) -> None:
    """Compare gradients of float32, of which small tensors have larger rounding differences."""
    assert whole_relative(left, right) <= 1e-6
    assert relative(left, right) <= 2e-6


def logprobs_of(engine: FSDPEngine, rows: list[Sequence]) -> np.ndarray:
    return np.concatenate(engine.forward(rows)["logprobs"])


# ------------------------------------------------------------ beside others as alone


@pytest.mark.parametrize("recomputed", [False, True])
def test_mixed_gradients_equal_those_alone(recomputed: bool, model: Path) -> None:
    options = {"layout": "padded", "gradient_checkpointing": recomputed}
    engine = make_engine(model, lora=LoRAConfig(rank=3), **options)
    adapters = add(engine, *NAMES)
    rows = assigned(["", *NAMES])
    batches = [engine._collate([rows[index] for index in part], "") for part in engine._plan(rows)]
    assert max(len({*batch.adapters}) for batch in batches) == 4, "rows are mixed"
    engine.forward_backward(rows, LOSS)
    mixed = logprobs_of(engine, rows)
    for name, adapter in adapters.items():
        alone = frozen_base(model, **options)
        (alone_adapter,) = add(alone, name).values()
        alone.forward_backward(of(rows, name), LOSS)
        assert_equal_gradients(gradients(adapter), gradients(alone_adapter))
        is_own = np.concatenate([np.full(len(row.tokens), row.adapter == name) for row in rows])
        np.testing.assert_allclose(mixed[is_own], logprobs_of(alone, of(rows, name)), atol=1e-5)
    default = make_engine(model, lora=LoRAConfig(rank=3), **options)
    default.forward_backward(of(rows, ""), LOSS)
    of_default = {n: p.grad for n, p in default.optimizer.parameters.items() if ".lora_B." in n}
    own = {n: engine.optimizer.parameters[n].grad for n in of_default}
    assert_equal_gradients(own, of_default)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "padded", "mixed": False},
        {"layout": "packed"},
        {"layout": "padded", "mixed": False, "dtype": "bfloat16"},
        {"layout": "padded", "dtype": "float16"},
    ],
)
def test_updates_in_own_micro_batches_are_bitwise_those_alone(
    options: dict[str, Any], model: Path
) -> None:
    options = {**options}
    is_mixed = options.pop("mixed", True)
    default = LoRAConfig(rank=3, mixed=is_mixed)
    engine = make_engine(model, lora=default, **options)
    adapters = add(engine, *NAMES)
    rows = assigned(["", *NAMES], 16)
    for _ in range(3):
        engine.forward_backward(rows, LOSS)
        engine.optim_step()
        for adapter in adapters.values():
            adapter.optim_step()
    outputs = logprobs_of(engine, rows)
    for name in NAMES:
        alone = frozen_base(model, mixed=is_mixed, **options)
        (adapter,) = add(alone, name).values()
        own_rows = of(rows, name)
        for _ in range(3):
            alone.forward_backward(own_rows, LOSS)
            adapter.optim_step()
        assert_equal(values(adapters[name]), values(adapter))
        is_own = np.concatenate([np.full(len(row.tokens), row.adapter == name) for row in rows])
        assert np.array_equal(outputs[is_own], logprobs_of(alone, own_rows))
    alone = make_engine(model, lora=default, **options)
    for _ in range(3):
        alone.forward_backward(of(rows, ""), LOSS)
        alone.optim_step()
    assert_equal(dict(alone.stream_adapter()), dict(engine.stream_adapter()))


def test_mixed_rows_in_16_bits_are_rounded_as_alone(model: Path) -> None:
    engine = frozen_base(model, layout="padded", dtype="bfloat16")
    add(engine, *NAMES)
    rows = assigned(NAMES)
    mixed = logprobs_of(engine, rows)
    for name in NAMES:
        alone = frozen_base(model, layout="padded", dtype="bfloat16")
        add(alone, name)
        is_own = np.concatenate([np.full(len(row.tokens), row.adapter == name) for row in rows])
        difference = np.abs(mixed[is_own] - logprobs_of(alone, of(rows, name)))
        assert difference.mean() < 0.01


@pytest.mark.parametrize("family", ["gpt2", "llama", "phi3"])
def test_families_compute_mixed_rows(family: str, tmp_path: Path) -> None:
    sizes = {"n_embd": 32} if family == "gpt2" else {}
    path = tiny_model(tmp_path, family=family, init_std=0.1, **sizes)
    rows = assigned(["x", "y"])
    config = LoRAConfig(rank=4, targets=["all-linear"])

    def engine_with(*names: str) -> tuple[FSDPEngine, list[NamedAdapter]]:
        engine = frozen_base(path, layout="padded")
        adapters = list[NamedAdapter]()
        for name in names:
            adapter = engine.add_adapter(new(name, config=config, seed=ord(name)))
            assert isinstance(adapter, NamedAdapter)
            adapters.append(adapter)
            generator = torch.Generator().manual_seed(ord(name))
            for param in params_of(adapter).values():
                param.data.normal_(0.0, 0.1, generator=generator)
        return engine, adapters

    engine, adapters = engine_with("x", "y")
    engine.forward_backward(rows, LOSS)
    for adapter, name in zip(adapters, ("x", "y"), strict=True):
        alone, (alone_adapter,) = engine_with(name)
        alone.forward_backward(of(rows, name), LOSS)
        assert whole_relative(gradients(adapter), gradients(alone_adapter)) <= 1e-6


# ------------------------------------------------------------ values


def test_scale_is_applied_once(model: Path) -> None:
    engine = frozen_base(model)
    adapters = add(engine, *NAMES)
    rows = make_rows(temperature=1.0)
    for name, adapter in adapters.items():
        for row in rows:
            row.adapter = name
        plain = AutoModelForCausalLM.from_pretrained(model)
        config = ADAPTERS[name]
        matrices = dict(adapter.stream_adapter())
        with torch.no_grad():
            for key, up in matrices.items():
                layer, found, _ = key.partition(".lora_B.")
                if found:
                    down = matrices[f"{layer}.lora_A.weight"]
                    weight = plain.get_submodule(layer.removeprefix("base_model.model.")).weight
                    weight += config.alpha / config.rank * up @ down
            row = rows[0]
            logits = plain(torch.from_numpy(row.tokens.astype(np.int64))[None]).logits[0].double()
        expected_T = logits.log_softmax(-1)[:-1].gather(
            1, torch.from_numpy(row.tokens[1:].astype(np.int64))[:, None]
        )[:, 0]
        (ours_T, *_) = engine.forward(rows)["logprobs"]
        mask_T = row.loss_mask[1:]
        np.testing.assert_allclose(ours_T[1:][mask_T], expected_T.numpy()[mask_T], atol=1e-4)
        assert adapter.adapter_config["r"] == config.rank


def test_first_value_depends_on_the_seed_alone(model: Path) -> None:
    first = add(frozen_base(model), "bob", moved=False)["bob"]
    engine = make_engine(model, lora=LoRAConfig(rank=3))
    torch.manual_seed(7)
    later = add(engine, "alice", "carol", "bob", moved=False)["bob"]
    assert_equal(values(first), values(later))
    other = frozen_base(model).add_adapter(new("bob", seed=5))
    assert isinstance(other, NamedAdapter)
    assert relative(values(other) | _zeros(other), values(first) | _zeros(first)) > 0.1
    rows = assigned(["bob"])
    base = logprobs_of(make_engine(model), of(assigned([""]), ""))
    assert np.array_equal(logprobs_of(engine, rows), base), "matrices B are 0"


def _zeros(adapter: NamedAdapter) -> Tensors:
    """Return ones in place of the matrices B, whose norm is 0."""
    return {n: torch.ones(1) for n in params_of(adapter) if ".lora_B." in n}


def test_state_is_saved_and_continues_bit_for_bit_while_others_go_on(
    model: Path, tmp_path: Path
) -> None:
    engine = frozen_base(model)
    adapters = add(engine, *NAMES)
    rows = assigned(NAMES)

    def update(engine: FSDPEngine, adapter: TrainedWeights, name: str) -> None:
        engine.forward_backward(of(rows, name), LOSS)
        adapter.optim_step()

    update(engine, adapters["alice"], "alice")
    adapters["alice"].save(tmp_path / "alice", {"step": 1})
    update(engine, adapters["bob"], "bob")
    update(engine, adapters["alice"], "alice")
    expected = values(adapters["alice"])
    bob = values(adapters["bob"])
    assert adapters["alice"].load(tmp_path / "alice") == {"step": 1}
    assert_equal(values(adapters["bob"]), bob)
    update(engine, adapters["alice"], "alice")
    assert_equal(values(adapters["alice"]), expected)
    other_engine = frozen_base(model)
    other = other_engine.add_adapter(new("dave", config=ADAPTERS["alice"]))
    assert isinstance(other, NamedAdapter)
    other.load(tmp_path / "alice")
    for row in rows:
        row.adapter = "dave" if row.adapter == "alice" else row.adapter
    update(other_engine, other, "dave")
    assert_equal(values(other), expected)
    with pytest.raises(UserError, match=r"has no 'model\.base_model"):
        adapters["carol"].load(tmp_path / "alice")
    wider = engine.add_adapter(new("wider", config=replace(ADAPTERS["alice"], rank=3)))
    with pytest.raises(UserError, match=r"shape \[2, 32\], not \[3, 32\].*the rank"):
        wider.load(tmp_path / "alice")


def test_default_adapter_is_saved_without_the_others(model: Path, tmp_path: Path) -> None:
    engine = make_engine(model, lora=LoRAConfig(rank=3))
    add(engine, *NAMES)
    rows = assigned(["", *NAMES])
    engine.forward_backward(rows, LOSS)
    engine.optim_step()
    engine.save(tmp_path, {})
    engine.forward_backward(of(rows, ""), LOSS)
    engine.optim_step()
    expected = dict(engine.stream_adapter())
    alone = make_engine(model, lora=LoRAConfig(rank=3))
    alone.load(tmp_path)
    alone.forward_backward(of(rows, ""), LOSS)
    alone.optim_step()
    assert_equal(dict(alone.stream_adapter()), expected)
    alone.export(tmp_path / "alone")
    engine.export(tmp_path / "beside")
    weights = [dict(e.stream_weights()) for e in (alone, engine)]
    assert_equal(*weights)
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert (tmp_path / "alone" / file).read_bytes() == (tmp_path / "beside" / file).read_bytes()


def test_removed_adapter_leaves_no_trace_and_can_be_added_again(model: Path) -> None:
    engine = make_engine(model, lora=LoRAConfig(rank=3))
    before = engine.fingerprint()
    default = dict(engine.stream_adapter())
    rows = assigned(["alice"])
    for _ in range(2):
        adapters = add(engine, "alice", "bob")
        assert_equal(dict(engine.stream_adapter()), default)
        own = values(adapters["alice"])
        engine.forward_backward(rows, LOSS)
        adapters["alice"].optim_step()
        engine.remove_adapter("alice")
        engine.remove_adapter("bob")
        assert engine.fingerprint() == before
        with pytest.raises(UserError, match="names the adapter 'alice', which the engine does not"):
            engine.forward(rows)
    again = add(engine, "alice")["alice"]
    assert_equal(values(again), own)
    engine.forward_backward(of(assigned([""]), ""), LOSS)
    assert engine.optim_step()["grad_norm"] > 0
    weights = dict(engine.stream_weights())
    assert weights.keys() == dict(make_engine(model).stream_weights()).keys()


@theirs_warns
def test_exported_adapter_loads_in_peft_with_equal_logprobs(model: Path, tmp_path: Path) -> None:
    import peft

    engine = frozen_base(model)
    assert dict(engine.stream_adapter()) == {}
    adapters = add(engine, *NAMES)
    rows = make_rows(4, temperature=1.0)
    for name, adapter in adapters.items():
        adapter.export(tmp_path / name)
        base = AutoModelForCausalLM.from_pretrained(model)
        theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / name))
        for row in rows:
            row.adapter = name
        ours = engine.forward(rows)["logprobs"]
        for row, ours_T in zip(rows, ours, strict=True):
            tokens = torch.from_numpy(row.tokens.astype(np.int64))
            with torch.no_grad():
                logprobs_TV = theirs(tokens[None]).logits[0].log_softmax(-1)
            theirs_T = logprobs_TV[:-1].gather(1, tokens[1:, None])[:, 0].numpy()
            mask_T = row.loss_mask[1:]
            np.testing.assert_allclose(ours_T[1:][mask_T], theirs_T[mask_T], atol=1e-4)
        again = frozen_base(model)
        loaded = again.add_adapter(new(name, folder=tmp_path / name, seed=99))
        assert isinstance(loaded, NamedAdapter)
        assert_equal(values(loaded), values(adapter))
        assert np.array_equal(logprobs_of(again, rows), np.concatenate(ours))


@theirs_warns
def test_folder_with_rank_and_alpha_patterns_is_computed_beside_others(
    model: Path, tmp_path: Path
) -> None:
    theirs = write_peft_adapter(model, tmp_path / "adapter", lora_dropout=0.5)
    theirs.merge_and_unload().save_pretrained(tmp_path / "merged")
    rows = make_rows()
    expected = logprobs_of(make_engine(tmp_path / "merged"), rows)
    engine = frozen_base(model, layout="padded")
    add(engine, *NAMES)
    engine.add_adapter(new("theirs", folder=tmp_path / "adapter"))
    for row in rows:
        row.adapter = "theirs"
    others = assigned(NAMES)
    mixed = engine.forward(rows + others)["logprobs"][: len(rows)]
    assert np.abs(np.concatenate(mixed) - expected).max() < 1e-4


# ------------------------------------------------------------ failures


def failing(batch: LossInput) -> Any:
    raise ZeroDivisionError


def test_failed_pass_drops_only_the_gradients_of_its_rows(model: Path) -> None:
    engine = make_engine(model, lora=LoRAConfig(rank=3))
    adapters = add(engine, *NAMES)
    rows = assigned(["", *NAMES])
    engine.forward_backward(rows, LOSS)
    kept = gradients(adapters["carol"])
    with pytest.raises(ZeroDivisionError):
        engine.forward_backward(of(rows, "alice") + of(rows, "bob"), failing)
    assert_equal(gradients(adapters["carol"]), kept)
    with pytest.raises(UserError, match="no gradient"):
        adapters["alice"].optim_step()
    with pytest.raises(UserError, match="no gradient"):
        adapters["bob"].optim_step()
    assert engine.optim_step()["grad_norm"] > 0
    assert adapters["carol"].optim_step()["grad_norm"] > 0
    engine.forward_backward(of(rows, "alice"), LOSS)
    unknown = replace(rows[0], adapter="nobody")
    with pytest.raises(UserError, match=r"'nobody'.*one of: alice, bob, carol"):
        engine.forward_backward([*of(rows, "alice"), unknown], LOSS)
    assert adapters["alice"].optim_step()["grad_norm"] > 0


def test_frozen_engine_computes_named_rows_by_the_base_model(model: Path) -> None:
    engine = make_engine(model, lora=LoRAConfig(rank=3))
    rows = assigned(["", "alice"])
    engine.forward_backward(of(rows, ""), LOSS)
    engine.optim_step()
    reference = engine.without_adapter()
    default = logprobs_of(engine, of(rows, ""))
    adapter = add(engine, "alice")["alice"]
    engine.forward_backward(rows, LOSS)
    engine.optim_step()
    adapter.optim_step()
    expected = logprobs_of(make_engine(model), [replace(row, adapter="") for row in rows[1::2]])
    assert np.array_equal(np.concatenate(reference.forward(of(rows, ""))["logprobs"]), default)
    assert np.array_equal(
        np.concatenate(reference.forward(of(rows, "alice"))["logprobs"]), expected
    )
    assert np.abs(logprobs_of(engine, of(rows, "alice")) - expected).max() > 0.01
    assert np.abs(logprobs_of(engine, of(rows, "")) - default).max() > 1e-4


def test_offloaded_parameters_change_no_adapter(model: Path) -> None:
    results = list[np.ndarray]()
    for cpu_offload in (False, True):
        engine = make_engine(model, lora=LoRAConfig(rank=3), cpu_offload=cpu_offload)
        adapter = add(engine, "alice")["alice"]
        engine.forward_backward(of(assigned(["", "alice"]), "alice"), LOSS)
        adapter.optim_step()
        results.append(logprobs_of(engine, of(assigned(["", "alice"]), "alice")))
    assert np.array_equal(results[0], results[1])


REFUSED: list[tuple[dict[str, Any], NewAdapter, str]] = [
    ({}, new("alice"), r"'alice'.* trained.* Set engine\.fsdp\.lora\.rank"),
    ({"lora": LoRAConfig(rank=2), "head": "value"}, new("alice"), "a value head has no adapters"),
    (
        {"lora": LoRAConfig(rank=2)},
        new("x", config=LoRAConfig(rank=2, targets=["w_in"])),
        r"modules \['w_in'\] not found",
    ),
    (
        {"lora": LoRAConfig(rank=2)},
        new("x", config=LoRAConfig(rank=2, targets=["q_proj", "lm_head"])),
        "'lm_head' is no linear layer inside the decoder",
    ),
]


@pytest.mark.parametrize(("options", "adapter", "error"), REFUSED)
def test_adapter_is_refused_and_the_engine_stays_as_it_was(
    options: dict[str, Any], adapter: NewAdapter, error: str, model: Path
) -> None:
    engine = make_engine(model, **options)
    before = engine.fingerprint()
    with pytest.raises(UserError, match=error):
        engine.add_adapter(adapter)
    assert engine.fingerprint() == before
    assert not [n for n, _ in engine.module.named_parameters() if ".named_" in n]


@pytest.mark.parametrize("name", ["", "a.b", "a/b", "ä", "x" * 101])
def test_name_that_no_file_can_have_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="use letters, digits"):
        new(name)


@pytest.mark.parametrize("name", ["default", "keys", "training", "lora_A", "weight"])
def test_name_that_torch_or_peft_use_is_possible(name: str, model: Path) -> None:
    engine = make_engine(model, lora=LoRAConfig(rank=3))
    adapter = engine.add_adapter(new(name))
    rows = assigned([name], 2)
    engine.forward_backward(rows, LOSS)
    assert adapter.optim_step()["grad_norm"] > 0
    engine.remove_adapter(name)


def test_mixture_of_experts_and_taken_names_are_refused(model: Path, tmp_path: Path) -> None:
    engine = frozen_base(model)
    add(engine, "alice")
    with pytest.raises(UserError, match="the name 'alice' is taken"):
        engine.add_adapter(new("alice"))
    mixture = tiny_model(
        tmp_path, family="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    )
    engine = frozen_base(mixture)
    with pytest.raises(UserError, match="mixture of experts cannot tell the rows"):
        engine.add_adapter(new("alice"))


def test_all_linear_is_the_same_beside_other_adapters(model: Path) -> None:
    alone = add(frozen_base(model), "bob")["bob"]
    engine = make_engine(model, lora=LoRAConfig(rank=2, targets=["all-linear"]))
    covered = lora.coverage(engine.module)
    beside = add(engine, "alice", "bob")["bob"]
    assert params_of(beside).keys() == params_of(alone).keys()
    assert lora.coverage(engine.module) == covered
