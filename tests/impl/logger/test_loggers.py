"""Log files have complete lines and each step once, also after a resume."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from arealite.api.logger import loggers
from arealite.base.trial_files import RunPaths
from arealite.ext.loggers.tensorboard import TensorBoardLogger
from arealite.impl.logger.jsonl import JSONLLogger


def lines(root: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in RunPaths(root).metrics.read_text().splitlines()]


def test_logged_line_is_readable_at_once(tmp_path: Path) -> None:
    logger = JSONLLogger(tmp_path / "run")
    logger.log(0, {"reward/mean": 0.5})
    (line,) = lines(tmp_path / "run")
    assert (line["step"], line["reward/mean"]) == (0, 0.5)
    assert line["time"] > 1e9
    logger.close()


def test_non_finite_values_are_not_logged(tmp_path: Path) -> None:
    logger = JSONLLogger(tmp_path)
    logger.log(0, {"a/nan": math.nan, "a/inf": math.inf, "a/one": 1.0})
    assert set(lines(tmp_path)[0]) == {"step", "time", "a/one"}
    logger.close()


def test_repeated_steps_appear_once_after_a_resume(tmp_path: Path) -> None:
    first = JSONLLogger(tmp_path)
    first.log(0, {"eval/reward": 0.1})
    for step in range(1, 5):
        first.log(step, {"reward/mean": float(step)})
    first.log(2, {"eval/reward": 0.2})
    first.log(4, {"eval/reward": 0.4})
    first.close()
    with RunPaths(tmp_path).metrics.open("a") as file:
        file.write('{"step": 4, "rew')  # the process was killed here
    second = JSONLLogger(tmp_path)
    second.rewind(2)
    second.log(3, {"reward/mean": 30.0})
    second.close()
    kept = [
        (line["step"], line.get("reward/mean"), line.get("eval/reward")) for line in lines(tmp_path)
    ]
    assert kept == [(0, None, 0.1), (1, 1.0, None), (2, 2.0, None), (3, 30.0, None)]


def test_rewind_to_0_removes_all_lines(tmp_path: Path) -> None:
    logger = JSONLLogger(tmp_path)
    logger.log(0, {"eval/reward": 0.1})
    logger.log(1, {"reward/mean": 0.1})
    logger.rewind(0)
    assert lines(tmp_path) == []
    logger.close()


def scalars(root: Path) -> list[tuple[int, float]]:
    events = EventAccumulator(str(RunPaths(root).tensorboard))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("reward/mean")]


def test_tensorboard_shows_each_step_once_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # File names end with a counter of this process, and file 10 is read before file 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    first = TensorBoardLogger(tmp_path)
    for step in range(1, 4):
        first.log(step, {"reward/mean": float(step)})
    first.close()
    second = TensorBoardLogger(tmp_path)
    second.rewind(1)
    second.log(2, {"reward/mean": 20.0})
    second.close()
    assert scalars(tmp_path) == [(1, 1.0), (2, 20.0)]


def test_jsonl_and_tensorboard_are_registered() -> None:
    assert loggers.get("jsonl") is JSONLLogger
    assert loggers.get("tensorboard") is TensorBoardLogger
