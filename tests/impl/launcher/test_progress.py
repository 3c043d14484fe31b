"""The progress line: new lines once each, also when a resumed run writes its metrics anew."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from arealite.impl.launcher.progress import Progress


def line(step: int, *, at: float, **metrics: float) -> str:
    return json.dumps({"step": step, "time": at, "reward/mean": 0.5, **metrics}) + "\n"


def test_each_new_line_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "metrics.jsonl"
    file.write_text(line(0, at=time.time() - 60))
    progress = Progress(file, total_steps=3, every=1)
    progress.poll()
    assert capsys.readouterr().out == "", "an earlier run's line"
    with file.open("a") as output:
        output.write(line(1, at=time.time()) + line(2, at=time.time())[:10])
    progress.poll()
    assert capsys.readouterr().out.startswith("step 2/3  reward 0.500")
    progress.poll()
    assert capsys.readouterr().out == "", "a torn line is not shown yet"


def test_a_rewritten_file_is_read_from_its_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file, now = tmp_path / "metrics.jsonl", time.time()
    file.write_text("".join(line(step, at=now - 60, note=1.5) for step in range(9)))
    progress = Progress(file, total_steps=9, every=1)
    progress.poll()
    shorter = tmp_path / "new"
    shorter.write_text(line(0, at=now - 60) + line(1, at=time.time()))
    os.replace(shorter, file)
    progress.poll()
    assert capsys.readouterr().out.splitlines() == ["step 2/9  reward 0.500"]


def test_log_lines_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text = "cannot read [/data/tools.json] of ROLES[role] :smile:"
    Progress(tmp_path / "m", 3).say(text)
    assert capsys.readouterr().out == text + "\n"


def test_evaluations_have_a_line_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    Progress(tmp_path / "m", 3).show({"step": 2, "time": 0.0, "eval/accuracy": 0.25})
    assert capsys.readouterr().out == "eval at step 2: held-out accuracy 0.250\n"


def test_an_offline_run_tells_its_total_with_each_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    progress = Progress(tmp_path / "m", 100, evaluates=True)
    progress.show({"step": 0, "time": 0.0, "eval/loss": 2.5})
    line = {"time": 0.0, "train/epoch": 0.0, "train/total_steps": 2.0, "train/loss": 1.25}
    progress.show({"step": 0, **line})
    progress.show({"step": 1, **line, "train/accuracy": 0.5})
    assert not progress.finished
    progress.show({"step": 2, "time": 0.0, "eval/loss": 1.0, "eval/accuracy": 0.75})
    assert progress.finished and progress.newest == 1
    assert capsys.readouterr().out.splitlines() == [
        "eval at step 0: held-out loss 2.500",
        "step 1/2  loss 1.2500",
        "step 2/2  loss 1.2500  accuracy 0.500",
        "eval at step 2: held-out loss 1.000, accuracy 0.750",
    ]


def test_a_run_that_evaluates_is_finished_with_its_last_evaluation(tmp_path: Path):
    plain, evaluates = (Progress(tmp_path / "m", 3, evaluates=each) for each in (False, True))
    for progress in (plain, evaluates):
        progress.show({"step": 1, "time": 0.0, "eval/accuracy": 0.25})
        assert not progress.finished
        progress.show(json.loads(line(2, at=0.0)))
    assert plain.finished and evaluates.trained and not evaluates.finished
    evaluates.show({"step": 3, "time": 0.0, "eval/accuracy": 0.5})
    assert evaluates.finished


def test_lines_of_a_host_whose_clock_is_behind_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file, now = tmp_path / "metrics.jsonl", time.time()
    progress = Progress(file, total_steps=2, every=1)
    file.write_text(line(0, at=now - 3600) + line(1, at=now - 7200))
    progress.poll()
    assert len(capsys.readouterr().out.splitlines()) == 2 and progress.trained
