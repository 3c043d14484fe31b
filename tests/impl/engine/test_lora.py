"""LoRA adapters in one process: training, export, checkpoints, and compatibility with peft."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from arealite.api.engine import Sequence
from arealite.api.engine_config import LoRAConfig
from arealite.base.errors import InvariantError, UserError
from arealite.impl.engine.fsdp import FSDPEngine
from tests.impl.engine.helpers import (
    LOSS,
    lengths,
    load,
    loss_of,
    make_engine,
    make_rows,
    save,
    weights,
)

pytestmark = pytest.mark.usefixtures("group")
theirs_warns = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


def trained(model: Path, updates: int = 3, **options: object) -> tuple[FSDPEngine, list[Sequence]]:
    engine, rows = make_engine(model, lora=LoRAConfig(rank=4), **options), make_rows()  # type: ignore[arg-type]
    for _ in range(updates):
        engine.train_batch(rows, lengths([rows]), loss_of(engine))
    return engine, rows


def farthest(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))


def test_lora_starts_as_the_base_model_and_trains_only_adapters(model: Path) -> None:
    engine, rows = trained(model, 0)
    other = make_engine(model)
    before = other.forward(rows, lengths([rows]))["logprobs"]
    assert farthest(engine.forward(rows, lengths([rows]))["logprobs"], before) == 0.0
    base = {n: p.clone() for n, p in engine.module.named_parameters() if not p.requires_grad}
    assert len(base) == len(weights(engine))
    for _ in range(3):
        engine.train_batch(rows, lengths([rows]), LOSS)
    now = dict(engine.module.named_parameters())
    assert all(torch.equal(now[name], tensor) for name, tensor in base.items())
    assert farthest(engine.forward(rows, lengths([rows]))["logprobs"], before) > 0.1
    reference = engine.without_adapter()
    assert farthest(reference.forward(rows, lengths([rows]))["logprobs"], before) == 0.0
    assert farthest(engine.forward(rows, lengths([rows]))["logprobs"], before) > 0.1
    with pytest.raises(InvariantError, match="frozen"):
        reference.train_batch(rows, lengths([rows]), LOSS)


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
    merged = make_engine(tmp_path / "export").forward(rows, lengths([rows]))["logprobs"]
    ours = engine.forward(rows, lengths([rows]))["logprobs"]
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
        each.train_batch(rows, lengths([rows]), LOSS)
    assert other.fingerprint() == engine.fingerprint()


@theirs_warns
def test_value_head_is_trained_with_lora_adapters(model: Path, tmp_path: Path) -> None:
    import peft

    engine, rows = trained(model, head="value")
    engine.export(tmp_path / "export")
    again = make_engine(tmp_path / "export", head="value").forward(rows, lengths([rows]))["values"]
    assert farthest(again, engine.forward(rows, lengths([rows]))["values"]) < 1e-4
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


def test_engine_errors_name_the_fix(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"engine\.fsdp\.lora\.targets \['w_in'\].*not found"):
        make_engine(model, lora=LoRAConfig(rank=4, targets=["w_in"]))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"pip install -e '.\[lora\]'"):
        make_engine(model, lora=LoRAConfig(rank=4))
