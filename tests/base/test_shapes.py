"""Shape mismatches are found from file headers before tensors are sent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from arealite.base.errors import RoleError
from arealite.base.model_folder import ModelTensors, read_shapes

MODEL = ModelTensors(
    shapes={"embed": [4, 2], "lm_head.weight": [4, 2], "image": [1]},
    owner="model",
    unused=["image"],
)


def test_shapes_are_read_from_all_files(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "m-1.safetensors", metadata={"format": "pt"})
    save_file({"b": torch.zeros(())}, tmp_path / "m-2.safetensors")
    assert read_shapes(tmp_path) == {"a": [2, 3], "b": []}
    assert read_shapes(tmp_path / "nowhere") == {}


@pytest.mark.parametrize("content", [b"", b"\x05", b"\xff" * 8 + b"{", b"\x02" + b"\0" * 7 + b"[]"])
def test_error_names_the_broken_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(RoleError, match=r"m\.safetensors is no safetensors file"):
        read_shapes(tmp_path)


def test_index_that_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    assert read_shapes(tmp_path) == {}


def test_tied_head_may_be_missing() -> None:
    assert MODEL.difference({"embed": [4, 2]}) == ""


def test_all_tensors_match_an_unknown_model() -> None:
    assert ModelTensors(shapes={}, owner="a folder that is elsewhere").difference({"a": [1]}) == ""


@pytest.mark.parametrize(
    ("sent", "difference"),
    [
        ({"embed": [4, 3]}, "tensor 'embed' has shape [4, 3], but [4, 2] in model"),
        ({"embed": [4, 2], "new": [1]}, "tensor 'new' [1] is not in model"),
        ({"lm_head.weight": [4, 2]}, "tensor 'embed' [4, 2] of model is missing"),
    ],
)
def test_first_difference_is_named(sent: dict[str, list[int]], difference: str) -> None:
    assert MODEL.difference(sent) == difference


def test_one_tensor_is_compared_without_the_others() -> None:
    assert MODEL.mismatch("embed", [4, 2]) == ""
    assert MODEL.mismatch("new", [1]) == "tensor 'new' [1] is not in model"


def test_file_that_would_block_is_refused_unopened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(RoleError, match=r"model\.safetensors is missing or not a regular file"):
        read_shapes(tmp_path)
