"""Comparison of an update's tensors with those of the served model folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from arealite_vllm_checkpoint import (
    ServedCheckpoint,
    TensorHeader,
    UpdateRefused,
    read_headers,
)
from safetensors.torch import load_file, save_file

from arealite.base import model_folder
from tests.models import tiny_model

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"
FREQUENCIES = "model.layers.0.self_attn.rotary_emb.inv_freq"


def header(*shape: int, code: str = "F32") -> TensorHeader:
    return TensorHeader(shape=shape, code=code)


def served(*, is_tied: bool = False) -> ServedCheckpoint:
    headers = {
        EMBEDDING: header(64, 8),
        HEAD: header(64, 8),
        NORM: header(8),
        FREQUENCIES: header(4),
        "steps": header(1, code="I64"),
    }
    return ServedCheckpoint(headers=headers, is_tied=is_tied)


def update(**changes: TensorHeader | None) -> dict[str, TensorHeader]:
    """Return the headers of a fitting update with changes; None removes a tensor."""
    headers = dict(served().headers)
    for name, new_header in changes.items():
        if new_header is None:
            del headers[name]
        else:
            headers[name] = new_header
    return headers


@pytest.mark.parametrize("code", ["F32", "BF16", "F16", "F64"])
def test_same_tensors_in_any_float_type_fit(code: str) -> None:
    served().check(update(**{NORM: header(8, code=code)}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({NORM: None}, f"tensor '{NORM}' [8] of the served model is missing"),
        ({HEAD: None}, f"tensor '{HEAD}' [64, 8] of the served model is missing"),
        ({"extra": header(2)}, "tensor 'extra' [2] is not in the served model"),
        ({NORM: header(9)}, f"tensor '{NORM}' has shape [9], but [8] in the served model"),
        ({NORM: header(8, 1)}, f"tensor '{NORM}' has shape [8, 1], but [8] in the served model"),
        (
            {NORM: header(8, code="I64")},
            f"tensor '{NORM}' has type I64, but F32 in the served model",
        ),
        (
            {"steps": header(1, code="F32")},
            "tensor 'steps' has type F32, but I64 in the served model",
        ),
    ],
)
def test_other_tensors_are_refused(changes: dict[str, TensorHeader | None], message: str) -> None:
    with pytest.raises(UpdateRefused) as refused:
        served().check(update(**changes))
    assert str(refused.value) == message


def test_tied_head_may_be_missing_or_new() -> None:
    served(is_tied=True).check(update(**{HEAD: None}))
    folder_without_head = ServedCheckpoint(headers=update(**{HEAD: None}), is_tied=True)
    folder_without_head.check(update())
    assert not folder_without_head.is_read(HEAD)
    with pytest.raises(UpdateRefused, match="lm_head"):
        ServedCheckpoint(headers=update(**{HEAD: None}), is_tied=False).check(update())


def test_tied_embedding_may_not_be_missing() -> None:
    with pytest.raises(UpdateRefused, match=EMBEDDING):
        served(is_tied=True).check(update(**{EMBEDDING: None}))


def test_tensors_that_vllm_drops_may_be_missing_or_new() -> None:
    served().check(update(**{FREQUENCIES: None}))
    served().check(update(**{"model.rotary_emb.cos_cached": header(3)}))


def test_unused_tensors_may_be_missing() -> None:
    served().check(update(**{NORM: None}), unused=[NORM])


def test_headers_of_a_folder_are_read(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    headers = read_headers(folder)
    expected = model_folder.read_headers(folder)
    assert {name: (list(h.shape), h.code, h.file) for name, h in headers.items()} == {
        name: (h.shape, h.dtype, h.file) for name, h in expected.items()
    }


def test_folder_with_index_reads_the_indexed_files(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "two.safetensors")
    save_file({"a": torch.zeros(4)}, tmp_path / "other.safetensors")
    with pytest.raises(UpdateRefused, match="twice"):
        read_headers(tmp_path)
    index = '{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert {name: h.shape for name, h in read_headers(tmp_path).items()} == {"a": (2,), "b": (3,)}


def test_index_without_end_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    with pytest.raises(UpdateRefused, match="has no safetensors files"):
        read_headers(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model.safetensors.index.json").symlink_to("/dev/zero")
    with pytest.raises(UpdateRefused, match="has no safetensors files"):
        read_headers(tmp_path)


def test_folder_without_complete_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UpdateRefused, match="has no safetensors files"):
        read_headers(tmp_path)
    with pytest.raises(UpdateRefused, match="has no safetensors files"):
        read_headers(tmp_path / "absent")
    file = tiny_model(tmp_path) / "model.safetensors"
    assert load_file(file)
    content = file.read_bytes()
    for broken in (content[:-1], content[:4], b""):
        file.write_bytes(broken)
        with pytest.raises(UpdateRefused, match="is not a complete safetensors file: "):
            read_headers(tmp_path)
    file.unlink()
    (tmp_path / "other.safetensors").symlink_to("absent")
    with pytest.raises(UpdateRefused, match="missing or not a regular file"):
        read_headers(tmp_path)
    (tmp_path / "other.safetensors").unlink()
    os.mkfifo(tmp_path / "other.safetensors")
    with pytest.raises(UpdateRefused, match="missing or not a regular file"):
        read_headers(tmp_path)
