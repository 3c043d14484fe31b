"""Two starts of one run with real W&B (offline and unreachable) and trackio (on this host)."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from arealite.api.logger import loggers
from arealite.base import config_tree, extras
from arealite.base.errors import UserError
from arealite.base.trial_files import RunPaths
from arealite.ext.loggers.services import config_of, run_id

pytestmark = pytest.mark.processes

TWO_STARTS = [(0, 0.0), (1, 1.0), (2, 2.0), (1, 11.0), (2, 12.0)]
EVALUATED = [(2, 0.5), (1, 0.25)] * 2


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        find_spec(package) is None, reason=f"{package} is not installed: the extra {package}"
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a run's folder."""
    folder = tmp_path / "exp" / "trial"
    folder.mkdir(parents=True)
    config_tree.write({"seed": 3, "trainer": {"type": "ppo"}}, RunPaths(folder).resolved)
    return folder


def start(logger: str, root: Path, *, upload_s: float = 120.0, **env: str) -> str:
    """Run two starts with an upload deadline of `upload_s`; return the output."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "TRACKIO_"))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.ext.loggers.service_run", logger, str(root), str(upload_s)],
        env={**own, "HOME": str(root.parent), **env},
        capture_output=True,
        text=True,
        timeout=280,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


@needs("wandb")
def test_wandb_resumes_the_same_run(root: Path) -> None:
    said = start("wandb", root, WANDB_MODE="offline")
    assert "left out" not in said
    files = sorted(root.glob("wandb/offline-run-*/*.wandb"))
    assert {file.stem for file in files} == {f"run-{run_id(root)}"}
    rows, configs = [], []
    for file in files:
        for record in records(file):
            if record.HasField("history"):
                items = record.history.item
                rows.append(
                    {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
                )
            if record.HasField("run"):
                assert (record.run.project, record.run.display_name) == ("exp", "trial")
                configs.append({i.key: json.loads(i.value_json) for i in record.run.config.update})
    assert seen(rows, "reward/mean") == TWO_STARTS
    assert seen(rows, "eval/reward") == EVALUATED
    assert any(config.get("trainer") == {"type": "ppo"} for config in configs)


@needs("wandb")
def test_unreachable_wandb_is_reported_once_per_start_and_blocks_nothing(root: Path) -> None:
    with socket.socket() as held:  # bound, not listening: connections are refused
        held.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{held.getsockname()[1]}"
        key = "0123456789" * 4
        said = start("wandb", root, upload_s=2.0, WANDB_BASE_URL=address, WANDB_API_KEY=key)
    assert said.count("logger disabled") == 2
    assert key not in said


@needs("trackio")
def test_trackio_resumes_the_same_run(root: Path) -> None:
    said = start("trackio", root, TRACKIO_DIR=str(root / "trackio"))
    assert "left out" not in said
    shutil.copy(root / "trackio" / "exp.db", root / "copy.db")
    with closing(sqlite3.connect(root / "copy.db")) as db:
        found = db.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
        (config,) = db.execute("SELECT DISTINCT config FROM configs").fetchone()
    assert {name for name, _, _ in found} == {run_id(root)}
    rows = [{"step": step, **json.loads(metrics)} for _, step, metrics in found]
    assert seen(rows, "reward/mean") == TWO_STARTS
    assert seen(rows, "eval/reward") == EVALUATED
    assert json.loads(config)["trainer"] == {"type": "ppo"}


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_missing_package_of_a_logger_is_a_user_error(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(module: str) -> Any:
        raise ModuleNotFoundError(name=module)

    check = loggers.get(name).check
    monkeypatch.setattr(extras.importlib, "import_module", absent)
    with pytest.raises(UserError, match=rf"pip install -e '.\[{name}\]'"):
        check()


def test_wandb_without_a_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arealite.ext.loggers.services.import_optional", lambda *_: None)
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match="Set WANDB_API_KEY, or WANDB_MODE=offline"):
        loggers.get("wandb").check()
    monkeypatch.setenv("WANDB_MODE", "offline")
    loggers.get("wandb").check()


def test_run_keeps_its_id_after_a_restart(root: Path) -> None:
    first = run_id(root)
    assert first.startswith("trial-")
    assert run_id(root) == first
    assert config_of(root) == {"seed": 3, "trainer": {"type": "ppo"}}
    assert config_of(root / "none") == {}


def seen(rows: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(row["step"], row[name]) for row in rows if name in row]


def records(file: Path) -> Iterator[Any]:
    """Read W&B's file: 7 bytes, then LevelDB's log format (blocks of 32 KiB) of protobufs."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, held = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        held += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(held)
            held = b""
