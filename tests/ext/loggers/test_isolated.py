"""A logger that fails in any way is reported once, and training continues."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from arealite.api.experiment_config import ExperimentConfig, LoggerConfig
from arealite.api.logger import MetricLogger
from arealite.api.trial import ClusterConfig
from arealite.ext.loggers import isolated
from arealite.ext.loggers.isolated import IsolatedLogger, without_secrets
from arealite.impl.logger.jsonl import JSONLLogger
from arealite.impl.trainer.base import open_loggers

does: dict[str, Callable[[], Any]] = {}
"""Behaviour of each call, by name."""
happened: list[str] = []


class Kept(MetricLogger):
    """A logger that records its calls."""

    def __init__(self, run_root: Path) -> None:
        self.happened = (
            happened  # a new list per test: a late thread must not write to that of another test
        )
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
    monkeypatch.setattr(isolated, "CLOSE_S", 120.0)
    happened = []
    does.clear()
    yield
    for release in released:
        release.set()


released: list[threading.Event] = []


def hangs() -> Callable[[], Any]:
    """Return a function that hangs until the test ends."""
    released.append(threading.Event())
    return released[-1].wait


def raises(text: str = "away") -> Callable[[], Any]:
    def fail() -> None:
        raise ConnectionError(text)

    return fail


def run(tmp_path: Path, steps: int = 3) -> list[str]:
    """Log some steps and close; return the reported reasons why the logger was disabled."""
    with capture_logs() as lines:
        sink = IsolatedLogger(tmp_path, Kept)
        sink.rewind(0)
        for step in range(steps):
            sink.log(step, {"reward/mean": 1.0})
        sink.close()
    return [line["why"] for line in lines if line["event"] == "logger disabled"]


def test_isolated_logger_gets_all_calls_in_order(tmp_path: Path) -> None:
    assert run(tmp_path) == []
    assert happened == ["open", "rewind 0", "log 0", "log 1", "log 2", "close"]


@pytest.mark.parametrize("call", ["open", "rewind 0", "log 0", "log 1", "close"])
def test_logger_that_raises_is_reported_once_and_disabled(call: str, tmp_path: Path) -> None:
    does[call] = raises()
    assert run(tmp_path) == ["ConnectionError: away"]
    after = ["open", "rewind 0", "log 0", "log 1", "log 2", "close"]
    before = after[: after.index(call)]
    closed = ["close"] if call not in ("open", "close") else []
    assert happened == before + closed, "nothing more is logged, and it is closed"


@pytest.mark.parametrize("call", ["open", "log 0", "close"])
def test_hanging_logger_does_not_block_the_trainer(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated, "CLOSE_S", 0.05)
    does[call] = hangs()
    assert run(tmp_path) == ["it did not close within 0.05 s"]
    assert call not in happened, "it hangs still"


def test_logger_with_too_many_queued_lines_is_disabled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated, "CLOSE_S", 0.01)
    monkeypatch.setattr(isolated, "MAX_QUEUED_LINES", 5)
    does["log 0"] = hangs()
    assert run(tmp_path, steps=20) == ["it is 5 lines late"]


def test_late_logger_that_catches_up_loses_no_line(tmp_path: Path) -> None:
    gate = threading.Event()
    does["log 0"] = gate.wait
    threading.Timer(0.05, gate.set).start()
    assert run(tmp_path, steps=4) == []
    assert happened == ["open", "rewind 0", *(f"log {n}" for n in range(4)), "close"]


def test_secrets_are_masked_in_the_reported_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "SOME_API_KEY", "0123456789abcdef")
    does["log 0"] = raises("bad key 0123456789abcdef")
    assert run(tmp_path) == ["ConnectionError: bad key $SOME_API_KEY"]
    assert without_secrets("no key") == "no key"


def test_jsonl_logger_is_not_isolated(tmp_path: Path):
    """The launcher reads progress from it, so a trainer that cannot write it must fail."""
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
