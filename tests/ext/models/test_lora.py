"""LoRA adapters in one process: training, export, checkpoints, and compatibility with peft."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from arealite.api.engine import Sequence
from arealite.api.engine_config import LoRAConfig
from arealite.base.errors import InvariantError, UserError
from arealite.ext.models import lora
from arealite.impl.engine.fsdp import FSDPEngine
from tests.fakes.peft_adapters import theirs_warns, write_peft_adapter
from tests.families.configs import CONFIGS
from tests.families.folders import build, write
from tests.impl.engine.helpers import (
    LOSS,
    load,
    loss_of,
    make_engine,
    make_rows,
    save,
    weights,
)
from tests.models import tiny_model

pytestmark = pytest.mark.usefixtures("group")


def trained(model: Path, updates: int = 3, **options: object) -> tuple[FSDPEngine, list[Sequence]]:
    engine, rows = make_engine(model, lora=LoRAConfig(rank=4), **options), make_rows()  # type: ignore[arg-type]
    for _ in range(updates):
        engine.train_batch(rows, loss_of(engine))
    return engine, rows


def farthest(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))


def test_lora_starts_as_the_base_model_and_trains_only_adapters(model: Path) -> None:
    engine, rows = trained(model, 0)
    other = make_engine(model)
    before = other.forward(rows)["logprobs"]
    assert farthest(engine.forward(rows)["logprobs"], before) == 0.0
    reference = engine.without_adapter()
    base = {n: p.clone() for n, p in engine.module.named_parameters() if not p.requires_grad}
    assert len(base) == len(weights(engine))
    for _ in range(3):
        engine.train_batch(rows, LOSS)
    now = dict(engine.module.named_parameters())
    assert all(torch.equal(now[name], tensor) for name, tensor in base.items())
    assert farthest(engine.forward(rows)["logprobs"], before) > 0.1
    assert farthest(reference.forward(rows)["logprobs"], before) == 0.0
    assert farthest(engine.forward(rows)["logprobs"], before) > 0.1
    with pytest.raises(InvariantError, match="frozen"):
        reference.train_batch(rows, LOSS)


@theirs_warns
@pytest.mark.parametrize("which", ["model", "untied"])
def test_export_has_merged_weights_and_the_adapter(
    which: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    import peft

    path: Path = request.getfixturevalue(which)
    engine, rows = trained(path)
    engine.export(tmp_path / "export")
    files = load_file(tmp_path / "export" / "model.safetensors")
    streamed = weights(engine)
    assert streamed.keys() == load_file(path / "model.safetensors").keys() == files.keys()
    assert all(torch.equal(files[name], tensor) for name, tensor in streamed.items())
    merged = make_engine(tmp_path / "export").forward(rows)["logprobs"]
    ours = engine.forward(rows)["logprobs"]
    assert farthest(merged, ours) < 1e-4
    theirs = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(path), str(tmp_path / "export" / "adapter")
    ).merge_and_unload()
    state = theirs.state_dict()
    for name, tensor in streamed.items():
        torch.testing.assert_close(tensor, state[name], rtol=1e-5, atol=1e-6)


def test_lora_checkpoint_has_only_adapters_and_resumes_bitwise(model: Path, tmp_path: Path) -> None:
    engine, rows = trained(model)
    save(engine, tmp_path / "step-3", {"step": 3})
    held = FileSystemReader(tmp_path / "step-3" / "state").read_metadata().state_dict_metadata
    assert held
    assert all(".lora_" in name for name in held)
    other, _ = trained(model, 1, seed=3)
    assert other.fingerprint() != engine.fingerprint()
    load(other, tmp_path / "step-3")
    for each in (engine, other):
        each.train_batch(rows, LOSS)
    assert other.fingerprint() == engine.fingerprint()


@theirs_warns
def test_value_head_is_trained_with_lora_adapters(model: Path, tmp_path: Path) -> None:
    import peft

    engine, rows = trained(model, head="value")
    engine.export(tmp_path / "export")
    again = make_engine(tmp_path / "export", head="value").forward(rows)["values"]
    assert farthest(again, engine.forward(rows)["values"]) < 1e-4
    assert farthest(again, [np.zeros_like(values) for values in again]) > 1e-2
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "export" / "adapter"))
    head = theirs.merge_and_unload().state_dict()["score.weight"]
    assert torch.equal(head, weights(engine)["score.weight"])


def test_gradient_checkpointing_does_not_change_weights(model: Path) -> None:
    plain, _ = trained(model, 2)
    other, _ = trained(model, 2, gradient_checkpointing=True)
    expected = weights(plain)
    for name, tensor in weights(other).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "options", "layers", "without"),
    [
        ("phi3", {}, "o_proj ×2, qkv_proj ×2, gate_up_proj ×2, down_proj ×2", ""),
        ("gpt2", {"n_embd": 32}, "c_attn ×2, c_proj ×4, c_fc ×2", ""),
        (
            "qwen3_moe",
            {
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 16,
                "head_dim": 8,
            },
            "q_proj ×2, k_proj ×2, v_proj ×2, o_proj ×2",
            "gate_up_proj ×2, down_proj ×2",
        ),
    ],
)
def test_all_linear_adapts_each_linear_layer_and_merges(
    family: str, options: dict[str, Any], layers: str, without: str, tmp_path: Path
) -> None:
    path = tiny_model(tmp_path / "model", family=family, init_std=0.1, **options)
    engine, rows = make_engine(path, lora=LoRAConfig(rank=4, targets=["all-linear"])), make_rows()
    assert lora.coverage(engine.module) == (layers, without)
    for _ in range(3):
        engine.train_batch(rows, LOSS)
    engine.export(tmp_path / "export")
    merged = make_engine(tmp_path / "export").forward(rows)["logprobs"]
    ours = engine.forward(rows)["logprobs"]
    assert farthest(merged, ours) < 1e-4
    base = make_engine(path).forward(rows)["logprobs"]
    assert farthest(merged, base) > 0.1


def test_layers_that_read_images_get_no_adapter(tmp_path: Path) -> None:
    name = (
        "gemma4, images"  # its image layers have the names of targets, and peft cannot adapt them
    )
    path = write(build(name, CONFIGS[name]), tmp_path / "model")
    engine = make_engine(path, lora=LoRAConfig(rank=4))
    adapted = [name for name, part in engine.module.named_modules() if hasattr(part, "lora_A")]
    assert adapted and all("language_model.layers." in name for name in adapted)


def test_layers_without_adapter_are_named_unless_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(lora.log, "warning", lambda _, layers, fix: warned.append(layers))
    path = tiny_model(tmp_path, family="phi3")
    make_engine(path, lora=LoRAConfig(rank=4))
    assert warned == ["qkv_proj ×2, gate_up_proj ×2"]
    make_engine(path, lora=LoRAConfig(rank=4, targets=["qkv_proj"]))
    make_engine(path, lora=LoRAConfig(rank=4, targets=["all-linear"]))
    assert len(warned) == 1


@theirs_warns
def test_adapter_of_peft_is_the_start_and_the_reference(model: Path, tmp_path: Path) -> None:
    rows = make_rows()
    theirs = write_peft_adapter(model, tmp_path / "adapter", alpha_pattern={})
    theirs.merge_and_unload().save_pretrained(tmp_path / "merged")
    expected = make_engine(tmp_path / "merged").forward(rows)["logprobs"]
    engine = make_engine(model, adapter=str(tmp_path / "adapter"))
    other = make_engine(model, adapter=str(tmp_path / "adapter"), cpu_offload=True)
    for each in (engine, other):
        reference = each.without_adapter()
        assert farthest(each.forward(rows)["logprobs"], expected) < 1e-4
        each.train_batch(rows, LOSS)
        moved = each.forward(rows)["logprobs"]
        assert farthest(moved, expected) > 0.01
        assert farthest(reference.forward(rows)["logprobs"], expected) < 1e-4
        assert farthest(each.forward(rows)["logprobs"], moved) == 0.0
    engine.export(tmp_path / "export")
    again = make_engine(model, adapter=str(tmp_path / "export" / "adapter"))
    assert again.fingerprint() == engine.fingerprint()
    merged = make_engine(tmp_path / "export").forward(rows)["logprobs"]
    ours = engine.forward(rows)["logprobs"]
    assert farthest(merged, ours) < 1e-4


def test_adapter_with_other_tensors_is_refused(model: Path, tmp_path: Path) -> None:
    engine, _ = trained(model, 0)
    engine.export(tmp_path / "export")
    file = tmp_path / "export" / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(iter(tensors))
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, file)
    with pytest.raises(
        UserError, match=rf"tensor '{name}' .* of its config on this model is missing"
    ):
        make_engine(model, adapter=str(file.parent))


def test_engine_errors_name_the_fix(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"engine\.fsdp\.lora\.targets \['w_in'\].*not found"):
        make_engine(model, lora=LoRAConfig(rank=4, targets=["w_in"]))
    with pytest.raises(UserError, match=r"modules \['w_in'\] not found.*targets=\[all-linear\]"):
        make_engine(model, lora=LoRAConfig(rank=4, targets=["q_proj", "w_in"]))
    with pytest.raises(UserError, match="'lm_head' is no linear layer inside the decoder"):
        make_engine(model, lora=LoRAConfig(rank=4, targets=["lm_head"]))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"pip install -e '.\[lora\]'"):
        make_engine(model, lora=LoRAConfig(rank=4))
