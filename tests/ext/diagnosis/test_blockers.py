"""`examine` finds the blocker among real processes that misbehave."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from arealite.api.findings import Finding
from arealite.ext.diagnosis.diagnosis import examine
from arealite.system.health import vitals
from tests.system.health.living import BLOCKED, BURSTS, IDLE, WAITS, innermost, living, shown
from tests.waiting import until


def found(folder: Path, cause: str, *, where: str = "") -> Finding:
    """Wait until the only finding has this cause, and a stack that ends in `where`; return it.

    On a busy machine, other findings may come first.
    """
    seen = list[Finding]()

    def is_it() -> bool:
        seen[:] = examine(folder)
        return [each.cause for each in seen] == [cause] and where in innermost(seen[0].stack)

    until(is_it, what=lambda: f"one {cause} {where}: {seen}", seconds=120.0)
    return seen[0]


@pytest.mark.skipif(
    not vitals.cpu_times(os.getpid(), os.getpid()), reason="this kernel has no scheduler statistics"
)
def test_process_that_shares_its_cpu_with_nine_others_is_starved(tmp_path: Path) -> None:
    """Half a second of work takes 5 s, because the process has a tenth of the CPU."""
    core = max(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        role = stack.enter_context(living("rollout-0", tmp_path, BURSTS))
        spins = [sys.executable, "-c", "while True: pass"]
        others = [subprocess.Popen(spins) for _ in range(9)]
        stack.callback(lambda: [(each.kill(), each.wait()) for each in others])
        threads = [int(each.name) for each in Path(f"/proc/{role.pid}/task").iterdir()]
        for each in [*threads, *(other.pid for other in others)]:
            os.sched_setaffinity(each, {core})
        assert found(tmp_path, "starved", where="in main").blocker == "rollout-0"


def test_stopped_process_is_found_at_once_until_it_continues(tmp_path: Path) -> None:
    with (
        living("datapipe-0", tmp_path, IDLE) as process,
        living("trainer-0", tmp_path, WAITS),
    ):
        until(lambda: shown("trainer-0", tmp_path)["waits"], what="the trainer's wait")
        assert examine(tmp_path, silent_s=60.0) == []
        process.send_signal(signal.SIGSTOP)
        finding = found(tmp_path, "stopped")
        assert finding.blocker == "datapipe-0"
        assert str(process.pid) in finding.detail
        assert finding.waiters[0].startswith("trainer-0: batch 12, ")
        process.send_signal(signal.SIGCONT)
        until(lambda: examine(tmp_path) == [], what="no finding after SIGCONT")


def test_killed_process_is_found_at_once(tmp_path: Path) -> None:
    with living("rollout-0", tmp_path, IDLE) as process:
        process.kill()
        assert found(tmp_path, "dead").blocker == "rollout-0"
        assert process.wait() == -signal.SIGKILL


def test_blocked_loop_is_found_with_its_stack(tmp_path: Path) -> None:
    with living("rollout-0", tmp_path, BLOCKED):
        assert found(tmp_path, "blocked", where="in block").blocker == "rollout-0"
