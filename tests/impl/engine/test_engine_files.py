"""Saving, resuming, exporting and streaming in one process."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from arealite.api.engine_config import LoRAConfig
from arealite.base.errors import UserError
from arealite.impl.engine import checkpoint, hf_folder
from tests.impl.engine.helpers import LOSS, load, make_engine, make_rows, save, weights

pytestmark = pytest.mark.usefixtures("group")


@pytest.mark.parametrize("updates_before", [0, 2])
def test_resumed_engine_is_bitwise_equal(model: Path, tmp_path: Path, updates_before: int) -> None:
    rows = make_rows()
    engine = make_engine(model, optimizer={"schedule": "linear", "warmup_steps": 3})
    for _ in range(updates_before):
        engine.train_batch(rows, LOSS)
    save(engine, tmp_path / "step-2", {"step": 2, "note": ["a", 1]})
    stats = engine.train_batch(rows, LOSS)
    other = make_engine(model, seed=5, optimizer={"schedule": "linear", "warmup_steps": 3})
    other.forward(rows)
    assert load(other, tmp_path / "step-2") == {"step": 2, "note": ["a", 1]}
    assert other.train_batch(rows, LOSS) == stats
    expected = weights(engine)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(other).items())
    facts = checkpoint.require(tmp_path / "step-2")
    assert (facts["step"], facts["world_size"]) == (2, 1)
    assert facts["torch"] == version("torch")


def test_broken_checkpoint_is_refused(model: Path, tmp_path: Path) -> None:
    engine = make_engine(model)
    save(engine, tmp_path / "step-1", {"step": 1})
    save(engine, tmp_path / "step-2", {"step": 2})
    next((tmp_path / "step-2" / "state").glob("*.distcp")).write_bytes(b"")
    with pytest.raises(UserError, match=r"Good ones in .*: step-1\."):
        load(engine, tmp_path / "step-2")


@pytest.mark.parametrize(
    ("options", "absent"),
    [({"lora": LoRAConfig(rank=2)}, "lora_A"), ({"optimizer": {"type": "sgd"}}, "momentum")],
)
def test_checkpoint_with_other_tensors_is_refused(
    options: dict[str, Any], absent: str, model: Path, tmp_path: Path
) -> None:
    save(make_engine(model), tmp_path / "step-1", {"step": 1})
    with pytest.raises(UserError, match=rf"has no '.*{absent}.*resume=never"):
        load(make_engine(model, **options), tmp_path / "step-1")


@pytest.mark.parametrize("which", ["model", "untied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_loads_with_from_pretrained(
    which: str, dtype: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(which)
    engine = make_engine(path, dtype=dtype)
    rows = make_rows()
    engine.train_batch(rows, LOSS)
    engine.export(tmp_path / "export")
    streamed = weights(engine)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert str(loaded.dtype) == f"torch.{dtype}"
    state = loaded.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in streamed.items())
    loaded.save_pretrained(tmp_path / "theirs")
    assert streamed.keys() == load_file(tmp_path / "theirs" / "model.safetensors").keys()
    assert list(streamed) == [name for name in state if name in streamed]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer.decode(tokenizer.encode("1+2")) == "1+2"
    assert len(make_engine(tmp_path / "export").forward(rows)["logprobs"]) == len(rows)


def test_streamed_tensors_are_copies(model: Path) -> None:
    engine = make_engine(model)
    held = weights(engine)
    copies = {name: tensor.clone() for name, tensor in held.items()}
    rows = make_rows()
    engine.train_batch(rows, LOSS)
    assert all(torch.equal(held[name], copies[name]) for name in held)


def test_large_models_are_written_and_read_in_several_files(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_folder, "FILE_BYTES", 20_000)
    engine = make_engine(model)
    engine.export(tmp_path / "export")
    files = list((tmp_path / "export").glob("model-*.safetensors"))
    assert len(files) > 2
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    expected = weights(engine)
    for got in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "export").state_dict(),
        weights(make_engine(tmp_path / "export")),
    ):
        assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def test_folder_without_safetensors_is_refused(model: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    make_engine(model).export(old)
    state = load_file(old / "model.safetensors")
    (old / "model.safetensors").unlink()
    torch.save(state, old / "pytorch_model.bin")
    with pytest.raises(UserError, match="has no tensors in safetensors files"):
        make_engine(old)
