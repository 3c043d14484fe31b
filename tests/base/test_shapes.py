"""Shape mismatches are found from file headers before tensors are sent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from arealite.base.errors import RoleError
from arealite.base.model_folder import check_shapes, read_shapes

HELD = {"embed": [4, 2], "lm_head.weight": [4, 2]}


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


def test_tied_head_may_be_missing() -> None:
    check_shapes({"embed": [4, 2]}, HELD, owner="model")
    check_shapes({"anything": [1]}, {}, owner="a folder that is elsewhere")


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ({"embed": [4, 3]}, r"'embed' has shape \[4, 3\] in the trainer, but \[4, 2\] in model"),
        ({"embed": [4, 2], "new": [1]}, r"'new' \[1\] of the trainer is not in model"),
        ({"lm_head.weight": [4, 2]}, r"'embed' \[4, 2\] of model is not in the trainer"),
    ],
)
def test_shape_mismatch_is_a_one_line_error(sent: dict[str, list[int]], said: str) -> None:
    with pytest.raises(RoleError, match=said):
        check_shapes(sent, HELD, owner="model")
