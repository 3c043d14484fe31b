"""The launcher's console prints each line once, also if metrics.jsonl is rewritten; on a terminal,
it draws the panel and restores the terminal."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from arealite.ext.view import console as console_module
from arealite.impl.launcher.progress import RunProgress
from tests.system.health.run_folder import Run
from tests.system.health.run_folder import line as line_of
from tests.terminals import Screen, Terminal, terminal
from tests.waiting import until


def line(step: int, *, at: float, **metrics: float) -> str:
    return json.dumps({"step": step, "time": at, "reward/mean": 0.5, **metrics}) + "\n"


def test_each_new_line_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "metrics.jsonl"
    file.write_text(line(1, at=1.0))
    progress = RunProgress(file, total_steps=3, every=1)
    progress.poll()
    assert capsys.readouterr().out == "", "an earlier run's line"
    with file.open("a") as output:
        output.write(line(2, at=2.0) + line(3, at=3.0)[:10])
    progress.poll()
    assert capsys.readouterr().out.startswith("step 2/3  reward 0.500")
    progress.poll()
    assert capsys.readouterr().out == "", "a torn line is not shown yet"


def test_rewritten_file_is_read_from_its_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(line(step, at=1.0, note=1.5) for step in range(1, 10)))
    progress = RunProgress(file, total_steps=9, every=1)
    progress.poll()
    shorter = tmp_path / "new"
    shorter.write_text(line(1, at=1.0) + line(2, at=2.0))
    os.replace(shorter, file)
    progress.poll()
    assert capsys.readouterr().out.splitlines() == ["step 2/9  reward 0.500"]


def test_log_lines_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text = "cannot read [/data/tools.json] of ROLES[role] :smile:"
    RunProgress(tmp_path / "m", 3).say(text)
    assert capsys.readouterr().out == text + "\n"


def test_evaluation_has_a_separate_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    RunProgress(tmp_path / "m", 3).show({"step": 2, "time": 0.0, "eval/reward": 0.25})
    assert capsys.readouterr().out == "eval at step 2: held-out reward 0.250\n"


def test_offline_run_has_its_total_in_each_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    progress = RunProgress(tmp_path / "m", 100, evaluates=True)
    progress.show({"step": 0, "time": 0.0, "eval/loss": 2.5})
    line = {"time": 0.0, "train/epoch": 0.0, "train/total_steps": 2.0, "train/loss": 1.25}
    progress.show({"step": 1, **line})
    progress.show({"step": 2, **line, "train/accuracy": 0.5})
    assert not progress.finished
    progress.show({"step": 2, "time": 0.0, "eval/loss": 1.0, "eval/accuracy": 0.75})
    assert progress.finished and progress.newest == 2
    assert capsys.readouterr().out.splitlines() == [
        "eval at step 0: held-out loss 2.500",
        "step 1/2  loss 1.2500",
        "step 2/2  loss 1.2500  accuracy 0.500",
        "eval at step 2: held-out loss 1.000, accuracy 0.750",
    ]


def test_run_with_evaluations_is_finished_after_the_last(tmp_path: Path):
    plain, evaluates = (RunProgress(tmp_path / "m", 3, evaluates=each) for each in (False, True))
    for progress in (plain, evaluates):
        progress.show({"step": 1, "time": 0.0, "eval/reward": 0.25})
        assert not progress.finished
        progress.show(json.loads(line(3, at=0.0)))
    assert plain.finished and evaluates.trained and not evaluates.finished
    evaluates.show({"step": 3, "time": 0.0, "eval/reward": 0.5})
    assert evaluates.finished


def test_evaluation_whose_samples_all_failed_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    progress = RunProgress(tmp_path / "m", 3, evaluates=True)
    progress.show({"step": 3, "time": 0.0, "eval/failed": 16.0, "eval/num_prompts": 16.0})
    assert progress.finished
    assert capsys.readouterr().out == "eval at step 3: every sample failed\n"


def test_lines_of_a_host_whose_clock_is_behind_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file, now = tmp_path / "metrics.jsonl", time.time()
    progress = RunProgress(file, total_steps=2, every=1)
    file.write_text(line(1, at=now - 3600) + line(2, at=now - 7200))
    progress.poll()
    assert len(capsys.readouterr().out.splitlines()) == 2 and progress.trained


# ---------------------------------------------------------------- on a terminal

SHOWN = """
import subprocess, sys
from pathlib import Path
from arealite.base.printable import guard_output
guard_output()
from arealite.base import log
from arealite.ext.view import console
from arealite.impl.launcher import progress as module
from tests.waiting import until

root = Path(sys.argv[1])
console.DRAW_S, console.LAST_S = 0.05, 60.0
progress = module.RunProgress(root / "metrics.jsonl", 3, every=1)
def trained(step):
    with (root / "metrics.jsonl").open("a") as file:
        file.write((root / f"step-{step}").read_text())
    progress.poll()
with progress.shown():
    progress.say("the first line")
    trained(1); trained(2)
    until((root / "go").exists, what="the test")
    BODY
print("after it")
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path)
    for step in range(1, 4):
        told = line_of(step, at=time.time() + step, time__step_s=1.5)
        (run.paths.root / f"step-{step}").write_text(told)
    return run


def shown(run: Run, body: str, **environment: str) -> AbstractContextManager[Terminal]:
    """Run a launcher's console; `body` runs after a panel of two steps is shown."""
    return terminal(["-c", SHOWN.replace("BODY", body), str(run.paths.root)], **environment)


def go_on(run: Run) -> None:
    (run.paths.root / "go").touch()


def panels(screen: Screen) -> list[int]:
    """Return the first line of each panel; every panel is complete."""
    tops = [n for n, text in enumerate(screen.lines) if text.startswith("╭")]
    bottoms = [n for n, text in enumerate(screen.lines) if text.startswith("╰")]
    assert len(tops) == len(bottoms), "\n".join(screen.lines)
    return tops


def test_panel_is_below_the_printed_lines(run: Run):
    body = "log.get('a').warning('of ours'); progress.say('a line\\nof two'); trained(3)"
    with shown(run, body) as on:
        on.until("2 of 3", then="╯")
        (top,) = panels(screen := on.screen(upto="╯"))
        assert screen.lines[:top] == ["the first line"], "and no lines of steps"
        go_on(run)
        assert on.end() == 0 and on.mode == on.first_mode
        (top,) = panels(screen := on.screen())
    assert sum("of ours" in text for text in screen.lines[:top]) == 1
    assert screen.lines[top - 2 : top] == ["a line", "of two"]
    assert "finished" in screen.lines[top] and "3 of 3" in screen.lines[top + 1], "the last state"
    assert screen.lines[-2:] == ["after it", ""] and not screen.is_cursor_hidden


def test_traceback_is_below_the_last_panel(run: Run):
    with shown(run, "raise KeyError('so it ends')") as on:
        on.until("2 of 3")
        go_on(run)
        assert on.end() == 1
        (top,) = panels(screen := on.screen())
    said = screen.lines.index("Traceback (most recent call last):")
    assert said > top and "so it ends" in screen.lines[-2] and not screen.is_cursor_hidden


def test_last_panel_is_complete_despite_foreign_output_and_input(run: Run):
    body = "subprocess.run(['sh', '-c', 'echo of a child >&2']); trained(3)"
    with shown(run, body) as on:
        on.until("2 of 3")
        on.press("typed\n")
        on.until("typed")
        go_on(run)
        assert on.end() == 0
        lines = on.screen().lines
    last = max(n for n, text in enumerate(lines) if text.startswith("╭"))
    assert "3 of 3" in lines[last + 1] and lines[-3].startswith("╰"), "\n".join(lines)


def test_panel_fits_a_resized_terminal(run: Run):
    with shown(run, "trained(3)") as on:
        on.until("2 of 3")
        on.resize(50, 12)
        on.until(f"╰{'─' * 46}╯")
        on.resize(100, 30)
        on.until(f"╰{'─' * 96}╯")
        go_on(run)
        assert on.end() == 0
        assert on.read().rstrip().endswith("after it")


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"CI": "true"}])
def test_output_without_a_panel_has_lines(run: Run, environment: dict[str, str]):
    with shown(run, "trained(3)", **environment) as on:
        go_on(run)
        assert on.end() == 0
        told = [f"step {step}/3  reward 0.500" for step in (1, 2, 3)]
        assert on.read().splitlines() == ["the first line", *told, "after it"]


def test_panel_that_fails_shows_its_error_and_the_run_continues(run: Run):
    breaks = "from arealite.ext.view.snapshot import RunReader\nRunReader.read = lambda self: 1 / 0"
    broken = SHOWN.replace("root =", f"{breaks}\nroot =")
    with terminal(["-c", broken.replace("BODY", "trained(3)"), str(run.paths.root)]) as on:
        on.until("no panel: ZeroDivisionError")
        go_on(run)
        assert on.end() == 0 and on.screen().lines[-2] == "after it"


STOPPED = """
import sys
from pathlib import Path
from arealite.base.config import save
from arealite.ext.view import console
from tests.impl.launcher.test_local import UNTIL_TERM, ScriptedLauncher, after
console.LAST_S = 60.0
done = Path(sys.argv[1]) / "done"
scripts = dict.fromkeys(("datapipe", "rollout"), after(done))
scripts["trainer"] = UNTIL_TERM + f"open({str(done)!r}, 'w')"
launcher = ScriptedLauncher(Path(sys.argv[1]), scripts)
save(launcher.config, launcher.paths.config)
sys.exit(launcher.run())
"""


def test_ctrl_c_in_a_terminal_ends_a_launcher_with_its_last_panel(run: Run):
    with terminal(["-c", STOPPED, str(run.paths.root)], columns=200) as on:
        on.until("╰")
        logs = run.paths.root / "e" / "t" / "logs"
        ranks = [logs / f"trainer-{rank}.log" for rank in (0, 1)]
        until(lambda: all(log.exists() and log.read_text() for log in ranks), what="the ranks")
        on.press("\x03")
        assert on.end() == 130 and on.mode == on.first_mode, on.read()[-2000:]
        (top,) = panels(screen := on.screen(columns=200))
    assert "stopping after this step" in screen.lines[top - 1]
    assert screen.lines[-2].startswith("run folder: ") and not screen.is_cursor_hidden


class Interactive(console_module.Terminal):
    is_drawable = True  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.is_interactive = True


def test_missing_disk_delays_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked, told, waited = threading.Event(), threading.Event(), list[bool]()

    class Away:
        def __init__(self, _: object) -> None: ...

        def read(self) -> None:
            asked.set()
            waited.append(told.wait(60))
            raise OSError("away")

    monkeypatch.setattr(console_module, "RunReader", Away)
    monkeypatch.setattr(console_module, "DRAW_S", 0.01)
    monkeypatch.setattr(console_module, "LAST_S", 60.0)
    monkeypatch.setattr(console_module, "Terminal", Interactive)
    progress = RunProgress(tmp_path / "metrics.jsonl", 3)
    with progress.shown():
        assert asked.wait(60)
        progress.say("a line")
        told.set()
    assert all(waited)
