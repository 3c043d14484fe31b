"""Files have the mode that the umask gives, except secrets; and they appear whole or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from arealite.api.experiment_config import ExperimentConfig
from arealite.base import config as base_config
from arealite.base.files import replacing
from arealite.base.trial_files import RunPaths
from arealite.ext.demo import sorting, tiny_model
from arealite.ext.evaluation.row_files import write_rows
from arealite.ext.models import lora
from arealite.ext.view.report import write_report
from arealite.impl.engine.hf_folder import write_weights
from arealite.impl.logger.jsonl import JSONLLogger
from arealite.system.names.name_registry import NameRegistry, create_secret

WEIGHTS = {"a": torch.zeros(4), "b": torch.ones(4)}


def export(folder: Path) -> None:
    write_weights(folder, WEIGHTS.items())


def export_in_parts(folder: Path) -> None:
    write_weights(folder, WEIGHTS.items(), max_bytes=16)
    assert len([*folder.glob("*.safetensors")]) == 2


def adapter(folder: Path) -> None:
    config = SimpleNamespace(save_pretrained=lambda folder: None)
    tensors = {"a.lora_A.weight": torch.zeros(2)}
    lora.write(tensors, config, folder / "adapter", base=folder)


def demo_model(folder: Path) -> None:
    tiny_model.make_tiny_model(folder)


def warm_demo_model(folder: Path) -> None:
    tiny_model.make_tiny_model(folder)
    sorting.warm_up(folder, 1, max_steps=1, batch_size=2)


def run_files(folder: Path) -> None:
    (folder / "model").mkdir()
    base_config.save(ExperimentConfig(), folder / "config.yaml")
    logger = JSONLLogger(folder)
    logger.log(1, {"time/step_s": 1.0})
    logger.rewind(1)
    logger.close()
    write_report(RunPaths(folder), folder / "report.html", most=1)
    (folder / "model").rmdir()


def rows(folder: Path) -> None:
    row = {"task_id": "train-0"}
    for name in ("rows.jsonl", "rows.parquet"):
        assert write_rows(folder / name, [row]) == 1


@pytest.fixture(params=[0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    "write", [export, export_in_parts, adapter, demo_model, warm_demo_model, run_files, rows]
)
def test_files_follow_the_umask(tmp_path: Path, umask: int, write: Callable[[Path], None]) -> None:
    (folder := tmp_path / "new").mkdir()
    write(folder)
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    assert any(path.is_file() for path in found.values())
    expected = {name: (0o777 if found[name].is_dir() else 0o666) & ~umask for name in found}
    assert {name: mode(path) for name, path in found.items()} == expected
    assert not [name for name in found if ".tmp" in name or ".mode" in name]


def test_secret_and_names_are_private_under_every_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        create_secret(tmp_path / "names")
        NameRegistry(root=tmp_path / "names").put("llm_server", "a", {"address": "x"})
    finally:
        os.umask(before)
    assert mode(tmp_path / "names") == 0o700
    files = [path for path in (tmp_path / "names").rglob("*") if path.is_file()]
    assert len(files) == 2 and {mode(path) for path in files} == {0o600}


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    (file := tmp_path / "a.txt").write_text("old")
    with pytest.raises(RuntimeError), replacing(file) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert file.read_text() == "old"
    with replacing(file) as temporary:
        temporary.write_text("new")
        assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert file.read_text() == "new"


def test_folder_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError), replacing(Path()) as temporary:
        temporary.write_text("new")
    assert not [*tmp_path.iterdir()]
