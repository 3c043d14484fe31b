"""A logger may fail in any way and at any time: training goes on, and is told once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from arealite.api.config import ExperimentConfig, LoggerConfig
from arealite.api.logger import MetricLogger
from arealite.api.trial import ClusterConfig
from arealite.impl.logger import guarded
from arealite.impl.logger.guarded import IsolatedLogger, without_secrets
from arealite.impl.logger.jsonl import JSONLLogger
from arealite.impl.trainer.components import open_loggers

does: dict[str, Callable[[], Any]] = {}
"""What a test wants at a call, by its name."""
happened: list[str] = []


class Kept(MetricLogger):
    """Keeps what it is told."""

    def __init__(self, run_root: Path) -> None:
        self.happened = happened  # a test's own: a late thread writes to nobody else's
        self.note("open")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.note(f"log {step}")

    def rewind(self, step: int) -> None:
        self.note(f"rewind {step}")

    def close(self) -> None:
        self.note("close")

    def note(self, call: str) -> None:
        does.get(call, lambda: None)()
        self.happened.append(call)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    global happened
    monkeypatch.setattr(guarded, "CLOSE_S", 120.0)
    happened = []
    does.clear()
    yield
    for release in released:
        release.set()


released: list[threading.Event] = []


def hangs() -> Callable[[], Any]:
    """Hang until the test is over."""
    released.append(threading.Event())
    return released[-1].wait


def raises(text: str = "away") -> Callable[[], Any]:
    def fail() -> None:
        raise ConnectionError(text)

    return fail


def run(tmp_path: Path, steps: int = 3) -> list[str]:
    """Log some steps and close; return why the logger was left out, each time it was told."""
    with capture_logs() as lines:
        sink = IsolatedLogger(tmp_path, Kept)
        sink.rewind(0)
        for step in range(steps):
            sink.log(step, {"reward/mean": 1.0})
        sink.close()
    return [line["why"] for line in lines if line["event"] == "logger disabled"]


def test_all_calls_arrive_in_order(tmp_path: Path) -> None:
    assert run(tmp_path) == []
    assert happened == ["open", "rewind 0", "log 0", "log 1", "log 2", "close"]


@pytest.mark.parametrize("call", ["open", "rewind 0", "log 0", "log 1", "close"])
def test_one_that_raises_is_told_once_and_left_out(call: str, tmp_path: Path) -> None:
    does[call] = raises()
    assert run(tmp_path) == ["ConnectionError: away"]
    after = ["open", "rewind 0", "log 0", "log 1", "log 2", "close"]
    before = after[: after.index(call)]
    let_go = ["close"] if call not in ("open", "close") else []
    assert happened == before + let_go, "nothing more is logged, and it is closed"


@pytest.mark.parametrize("call", ["open", "log 0", "close"])
def test_one_that_hangs_holds_nobody(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded, "CLOSE_S", 0.05)
    does[call] = hangs()
    assert run(tmp_path) == ["it did not close within 0.05 s"]
    assert call not in happened, "it hangs still"


def test_one_that_is_very_late_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded, "CLOSE_S", 0.01)
    monkeypatch.setattr(guarded, "MAX_QUEUED_LINES", 5)
    does["log 0"] = hangs()
    assert run(tmp_path, steps=20) == ["it is 5 lines late"]


def test_one_that_catches_up_loses_nothing(tmp_path: Path) -> None:
    gate = threading.Event()
    does["log 0"] = gate.wait
    threading.Timer(0.05, gate.set).start()
    assert run(tmp_path, steps=4) == []
    assert happened == ["open", "rewind 0", *(f"log {n}" for n in range(4)), "close"]


def test_no_secret_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "SOME_API_KEY", "0123456789abcdef")
    does["log 0"] = raises("bad key 0123456789abcdef")
    assert run(tmp_path) == ["ConnectionError: bad key $SOME_API_KEY"]
    assert without_secrets("no key") == "no key"


def test_the_runs_own_record_is_not_left_out(tmp_path: Path):
    """The launcher reads from it how far the run is: a trainer that cannot write it must fail."""
    config = replace(
        ExperimentConfig(),
        cluster=ClusterConfig(run_root=str(tmp_path)),
        logger=LoggerConfig(types=["jsonl", "tensorboard"]),
    )
    record, *others = open_loggers(config)
    assert type(record) is JSONLLogger
    assert [type(each) for each in others] == [IsolatedLogger]
    for sink in (record, *others):
        sink.close()
