"""`arealite top` shows the panel of a running or finished run, on a terminal and in a pipe."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from arealite.base import log
from arealite.cli.main import main
from tests.system.health.living import show
from tests.system.health.run_folder import Run, line
from tests.terminals import terminal
from tests.waiting import spawned

TOP = ["-m", "arealite.cli.main", "top"]


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo the process setup of a command, because other tests share the process."""
    monkeypatch.setattr(log, "setup", lambda *_: None)
    numbers = signal.SIGINT, signal.SIGTERM
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path)
    run.paths.metrics.write_text(line(1) + line(2))
    return run


def add(run: Run, step: int) -> None:
    with run.paths.metrics.open("a") as file:
        file.write(line(step))


def top(run: Run, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["top", str(run.paths.root), *words])
    return code, capsys.readouterr().out


def test_finished_run_is_shown_once(run: Run, capsys: pytest.CaptureFixture[str]):
    add(run, 3)
    code, text = top(run, capsys)
    assert code == 0 and "\x1b" not in text
    assert "arealite/trial · async_ppo · finished" in text and "3 of 3" in text


def test_once_shows_a_running_run_and_exits(run: Run, capsys: pytest.CaptureFixture[str]):
    show(run.vitals, "trainer-0")
    code, text = top(run, capsys, "--once")
    assert code == 0 and "running" in text and "2 of 3" in text


def test_pipe_gets_a_line_per_step_and_the_panel_at_the_end(run: Run):
    show(run.vitals, "trainer-0")
    command = [sys.executable, *TOP, str(run.paths.root), "--every", "0.1"]
    with spawned(command, os.environ) as process:
        assert process.stdout is not None
        lines = list[str]()
        for step in range(3, 2000):  # only lines after the start are printed
            add(run, step)
            if select.select([process.stdout], [], [], 0.1)[0]:
                lines.append(process.stdout.readline())
                break
        (run.vitals / "trainer-0.json").unlink()
        lines += process.stdout.readlines()
        assert process.wait(60.0) == 0
    (first, *_), panel = lines, [text for text in lines if text[0] in "╭│╰"]
    assert first.startswith("step ") and "reward 0.500" in first
    assert panel[0].startswith("╭") and lines[-len(panel) :] == panel


def test_folder_without_a_run_is_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["top", str(tmp_path)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "config.yaml" in said and "runs/EXPERIMENT/TRIAL" in said


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "soon"])
def test_invalid_interval_is_refused(run: Run, seconds: str):
    with pytest.raises(SystemExit):
        main(["top", str(run.paths.root), "--every", seconds])


def test_top_reads_folders_that_are_not_writable(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("read-only")

    show(run.vitals, "trainer-0")
    before = {file: file.stat().st_mtime_ns for file in sorted(run.paths.root.rglob("*"))}
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    code, text = top(run, capsys, "--once")
    assert code == 0 and "running" in text
    after = {file: file.stat().st_mtime_ns for file in sorted(run.paths.root.rglob("*"))}
    assert after == before, "it writes nothing into a run"


def test_q_exits_and_restores_the_terminal(run: Run):
    show(run.vitals, "trainer-0")
    with terminal([*TOP, str(run.paths.root), "--every", "0.1"]) as on:
        on.until("2 of 3")
        add(run, 3)
        on.until("3 of 3")
        anew = run.paths.root / "anew"
        anew.write_text(line(1))
        os.replace(anew, run.paths.metrics)  # as a resumed trainer does
        on.until("1 of 3")
        assert on.mode != on.first_mode
        on.press("q")
        assert on.end() == 0 and on.mode == on.first_mode
        screen = on.screen()
    assert sum(text.startswith("╭") for text in screen.lines) == 1
    assert "1 of 3" in screen.lines[1] and not screen.is_cursor_hidden


@pytest.mark.parametrize("ends", ["ctrl-c", "sigterm", "the run"])
def test_each_kind_of_exit_restores_the_terminal(run: Run, ends: str):
    show(run.vitals, "trainer-0")
    with terminal([*TOP, str(run.paths.root), "--every", "0.1"]) as on:
        on.until("2 of 3")
        if ends == "ctrl-c":
            on.press("\x03")
        elif ends == "sigterm":
            on.process.terminate()
        else:
            add(run, 3)
            (run.vitals / "trainer-0.json").unlink()
        assert on.end() == 0 and on.mode == on.first_mode
        screen = on.screen()
    assert [text[0] for text in screen.lines if text][-1] == "╰" and not screen.is_cursor_hidden


def test_top_imports_no_torch(run: Run):
    code = "import sys; import arealite.ext.view.top; print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "False\n"
