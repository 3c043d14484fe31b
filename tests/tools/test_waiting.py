"""tests/waiting.py, with which all tests check that a process has exited."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.sglang.real import Real
from tests.waiting import has_exited, until_exited

TESTS = Path(__file__).resolve().parents[1]
OTHERWISE = re.compile(
    r"pid_exists|STATUS_ZOMBIE|wait_procs|os\.kill\([^,]+, 0\)|(?<!loop)\.is_running\(\)"
)
ALLOWED = {
    "waiting.py": "the helper",
    "test_waiting.py": "this file",
    "sandboxes.py": "tests of the sandbox look for zombies",
}


IGNORING = """
import os, signal, subprocess
from tests.waiting import stop_ignoring_signals_in_children
stop_ignoring_signals_in_children()
for name in ("INT", "QUIT", "HUP"):
    number = getattr(signal, f"SIG{name}")
    os.kill(os.getpid(), number)
    assert subprocess.run(["sh", "-c", f"kill -{name} $$"]).returncode == -number, name
"""


def test_children_of_a_process_that_ignores_signals_do_not_ignore_them() -> None:
    shell = ["/bin/sh", "-c", "trap '' INT QUIT HUP; exec \"$@\"", "sh"]
    done = subprocess.run([*shell, sys.executable, "-c", IGNORING], cwd=TESTS.parent, timeout=60)
    assert done.returncode == 0


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """Return a process that waits until it is killed."""
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        yield process
        process.kill()


def test_zombie_process_has_exited(child: subprocess.Popen[bytes]) -> None:
    known = psutil.Process(child.pid)
    assert not has_exited(child.pid) and not has_exited(known)
    child.kill()
    until_exited(child.pid, known)
    assert known.status() == psutil.STATUS_ZOMBIE and psutil.pid_exists(child.pid)
    assert has_exited(child.pid) and has_exited(known)
    assert child.wait() == -signal.SIGKILL
    assert has_exited(child.pid) and has_exited(known)


def test_wait_for_a_running_process_times_out(child: subprocess.Popen[bytes]) -> None:
    with pytest.raises(pytest.fail.Exception, match=f"the end of {child.pid}"):
        until_exited(child.pid, seconds=0.0)


def test_process_with_a_reused_pid_has_exited() -> None:
    earlier = psutil.Process(os.getpid())
    earlier._ident = (earlier.pid, 1.0)  # another start time
    assert has_exited(earlier) and not has_exited(os.getpid())


def test_server_has_exited_when_kill_returns(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    with subprocess.Popen(command, start_new_session=True) as process:
        Real("http://127.0.0.1:1", process, tmp_path / "log").kill()
        assert process.poll() == -signal.SIGKILL


def test_all_tests_use_has_exited() -> None:
    found = [
        f"{file.relative_to(TESTS)}:{number}: {line.strip()}"
        for file in sorted(TESTS.rglob("*.py"))
        if file.name not in ALLOWED
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if OTHERWISE.search(line)
    ]
    assert not found, "\n".join(["use tests.waiting.has_exited or until_exited:", *found])
