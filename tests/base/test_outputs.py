"""A process whose stdout or stderr cannot be written continues, and writes to its log."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.terminals import closed_pipe

PROTECTED = """
import os, subprocess, sys
from pathlib import Path
from arealite.base import outputs
from arealite.base.printable import guard_output
log = Path(sys.argv[1])
outputs.open_missing()
guard_output()
outputs.protect()
BODY
sys.exit(7)
"""
LINES = """
outputs.log_to(log)
for number in range(3):
    print("out", number, flush=True)
    print("err", number, file=sys.stderr)
"""
EXPECTED = ["err 0", "err 1", "err 2", "out 0", "out 1", "out 2"]


@contextmanager
def closed_terminal() -> Iterator[int]:
    """Yield a terminal that has disappeared: each write fails with EIO."""
    master, slave = pty.openpty()
    os.close(master)
    try:
        yield slave
    finally:
        os.close(slave)


@contextmanager
def full_device() -> Iterator[int]:
    """Yield a file on a full disk."""
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


BROKEN = [closed_pipe, closed_terminal, full_device]


def protected(
    body: str, log: Path, stdout: int, stderr: int | None = None, *options: str
) -> subprocess.CompletedProcess[str]:
    """Run `body` with protected outputs."""
    return subprocess.run(
        [sys.executable, *options, "-c", PROTECTED.replace("BODY", body), str(log)],
        stdout=stdout,
        stderr=stdout if stderr is None else stderr,
        text=True,
        timeout=60,
    )


def announcements(text: str) -> int:
    return text.count("is closed or full")


@pytest.mark.parametrize("options", [(), ("-u",)], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("broken", BROKEN)
def test_text_of_a_broken_output_is_logged_after_one_announcement(
    broken, options: tuple[str, ...], tmp_path: Path
) -> None:
    log = tmp_path / "logs" / "role-0.log"
    with broken() as output:
        done = protected(LINES, log, output, None, *options)
    assert done.returncode == 7
    text = log.read_text()
    assert announcements(text) == 1
    assert sorted(text.splitlines()[1:]) == EXPECTED


@pytest.mark.parametrize("closed", ["1", "2"])
def test_open_output_still_gets_its_text(closed: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with closed_pipe() as output:
        streams = (output, subprocess.PIPE) if closed == "1" else (subprocess.PIPE, output)
        done = protected(LINES, log, *streams)
    assert done.returncode == 7
    shown = (done.stdout or done.stderr).splitlines()
    logged = log.read_text().splitlines()[1:]
    assert (shown, logged) == ((EXPECTED[:3], EXPECTED[3:])[:: 1 if closed == "1" else -1])


def test_output_that_is_closed_at_the_start_is_logged(tmp_path: Path) -> None:
    """Without a replacement, the first opened files would be stdin, stdout and stderr."""
    log = tmp_path / "log"
    body = LINES + 'file = log.with_name("data").open("w")\nassert file.fileno() > 2\n'
    script = PROTECTED.replace("BODY", body)
    shell = ["/bin/sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    done = subprocess.run([*shell, sys.executable, "-c", script, str(log)], timeout=60)
    assert done.returncode == 7
    assert announcements(log.read_text()) == 1
    assert sorted(log.read_text().splitlines()[1:]) == EXPECTED


def test_output_may_break_at_any_moment(tmp_path: Path) -> None:
    log = tmp_path / "log"
    body = 'outputs.log_to(log)\nprint("first", flush=True)\nsys.stdin.readline()\n'
    script = PROTECTED.replace("BODY", body + 'print("second")\n')
    with subprocess.Popen(
        [sys.executable, "-c", script, str(log)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "first\n"
        process.stdout.close()
        process.stdin.write("\n")
        process.stdin.close()
        assert process.wait(60) == 7
    assert log.read_text().splitlines()[1:] == ["second"]


def test_text_before_the_log_is_known_is_logged_later(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    body = f"""
print("before")
sys.stdout.flush()
outputs.log_to(log)
print("in the first", flush=True)
outputs.log_to(Path({str(second)!r}))
print("in the second", flush=True)
"""
    with closed_pipe() as output:
        assert protected(body, first, output).returncode == 7
    assert first.read_text().splitlines()[1:] == ["before", "in the first"]
    assert second.read_text().splitlines()[1:] == ["in the second"]
    assert announcements(first.read_text()) == announcements(second.read_text()) == 1


def test_later_child_processes_write_to_the_log(tmp_path: Path) -> None:
    body = 'outputs.log_to(log)\nprint("own", flush=True)\n'
    body += 'subprocess.run(["/bin/sh", "-c", "echo of a child"], check=True)\n'
    with closed_pipe() as output:
        assert protected(body, tmp_path / "log", output).returncode == 7
    assert (tmp_path / "log").read_text().splitlines()[1:] == ["own", "of a child"]


@pytest.mark.parametrize("log", ["/proc/nowhere/log", "/dev/full", ""])
def test_log_that_cannot_be_written_ends_nothing(log: str) -> None:
    body = LINES if log else LINES.replace("outputs.log_to(log)", "")
    with full_device() as output:
        assert protected(body, Path(log), output).returncode == 7


def test_output_of_a_traceback_does_not_change_the_exit_code(tmp_path: Path) -> None:
    body = "outputs.log_to(log)\nraise ValueError('wrong')\n"
    with closed_pipe() as output:
        assert protected(body, tmp_path / "log", output).returncode == 1
    assert (tmp_path / "log").read_text().endswith("ValueError: wrong\n")


def test_output_that_another_program_made_non_blocking_gets_all_text(tmp_path: Path) -> None:
    body = "outputs.log_to(log)\nos.set_blocking(1, False)\nprint('x' * 1_000_000)\n"
    done = protected(body, tmp_path / "log", subprocess.PIPE)
    assert (done.returncode, len(done.stdout)) == (7, 1_000_001)
    assert not (tmp_path / "log").exists()


def test_plain_python_dies_of_these_outputs() -> None:
    """The outputs of these tests are broken indeed."""
    for broken in BROKEN:
        with broken() as output:
            code = "print('x', flush=True)"
            done = subprocess.run([sys.executable, "-c", code], stdout=output, stderr=output)
            assert done.returncode not in (0, -signal.SIGPIPE)
