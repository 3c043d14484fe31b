"""Checkpoint folders are atomic, listed and pruned; broken folders are refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from arealite.base.errors import UserError
from arealite.impl.engine import checkpoint


def write(root: Path, step: int, text: str = "weights") -> Path:
    path = root / f"step-{step:06d}"
    temp = checkpoint.begin(path)
    (temp / "inner").mkdir()
    (temp / "inner" / "data.bin").write_text(text)
    assert not path.exists() or manifest_text(path) != ""
    checkpoint.commit(path, {"step": step, "world_size": 1})
    return path


def manifest_text(path: Path) -> str:
    return (path / checkpoint.MANIFEST).read_text()


def test_manifest_lists_sizes_and_facts(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    found = json.loads(manifest_text(path))
    assert found == {"files": {"inner/data.bin": 7}, "step": 3, "world_size": 1}
    assert checkpoint.require(path) == found
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000003"]


def test_latest_is_by_step_and_skips_broken_ones(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "absent") is None
    paths = {step: write(tmp_path, step) for step in (12, 2, 7)}
    assert checkpoint.list_good(tmp_path) == [paths[2], paths[7], paths[12]]
    (paths[12] / "inner" / "data.bin").write_text("weig")
    (paths[7] / checkpoint.MANIFEST).write_text("{")
    assert checkpoint.latest(tmp_path) == paths[2]


@pytest.mark.parametrize("damage", ["cut", "gone", "no manifest"])
def test_error_of_a_broken_checkpoint_lists_the_good_ones(tmp_path: Path, damage: str) -> None:
    write(tmp_path, 1)
    path = write(tmp_path, 2)
    data = path / "inner" / "data.bin"
    if damage == "cut":
        data.write_text("w")
    else:
        (data if damage == "gone" else path / checkpoint.MANIFEST).unlink()
    with pytest.raises(UserError, match=r"is broken .*Good ones in .*: step-000001\."):
        checkpoint.require(path)
    with pytest.raises(UserError, match="does not exist"):
        checkpoint.require(tmp_path / "step-000009")


def test_prune_keeps_the_newest_and_removes_temporary_folders(tmp_path: Path) -> None:
    paths = [write(tmp_path, step) for step in (1, 2, 3)]
    checkpoint.begin(tmp_path / "step-000004")
    checkpoint.prune(tmp_path, keep=2)
    assert checkpoint.list_good(tmp_path) == paths[1:]
    checkpoint.prune(tmp_path, keep=0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000003"]


def test_interrupted_save_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = write(tmp_path, 1)
    (checkpoint.begin(tmp_path / "step-000002") / "data.bin").write_text("half")
    assert checkpoint.list_good(tmp_path) == [old]

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", die)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 2)
    assert checkpoint.list_good(tmp_path) == [old]


def fast_and_slow_rank(root: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """List checkpoints on a rank after another rank has renamed them."""
    rename = os.rename

    def late(source: Path, target: Path) -> None:
        rename(source, target)
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", late)
        return checkpoint.list_good(root)


def test_existing_manifest_file_is_replaced_at_commit(tmp_path: Path) -> None:
    path = tmp_path / "export"
    (checkpoint.begin(path) / checkpoint.MANIFEST).write_text("copied from the source model")
    checkpoint.commit(path, {})
    assert checkpoint.require(path) == {"files": {}}


def test_crash_between_the_renames_of_a_replacement_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, 1, "old")
    rename = os.rename

    def die_at_the_second(source: Path, target: Path) -> None:
        if Path(target) == path:
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", die_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path, 1, "newer")
    assert not path.exists()
    assert fast_and_slow_rank(tmp_path, monkeypatch) == [path]
    assert checkpoint.latest(tmp_path) == path
    assert (path / "inner" / "data.bin").read_text() == "old"
    checkpoint.prune(tmp_path, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    write(tmp_path, 1, "old")
    path = write(tmp_path, 1, "newer")
    assert (path / "inner" / "data.bin").read_text() == "newer"
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
