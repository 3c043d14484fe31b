"""Which role is the blocker, among real processes that misbehave."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from arealite.system.health import vitals
from arealite.system.health.diagnosis import Finding, examine
from tests.system.health.living import BLOCKED, BURSTS, IDLE, WAITS, innermost, living, shown
from tests.waiting import until


def found(folder: Path, cause: str, *, where: str = "") -> Finding:
    """Wait until the only finding has this cause, and a stack that ends there; return it.

    On the way there are others: who gets no CPU for seconds is found, too.
    """
    seen = list[Finding]()

    def is_it() -> bool:
        seen[:] = examine(folder)
        return [each.cause for each in seen] == [cause] and where in innermost(seen[0].stack)

    until(is_it, what=lambda: f"one {cause} {where}: {seen}", seconds=120.0)
    return seen[0]


@pytest.mark.skipif(not vitals.spent(os.getpid(), os.getpid()), reason="this kernel keeps no books")
def test_a_process_beside_many_others_on_its_cpu_is_found_starved(tmp_path: Path) -> None:
    """Its half a second takes 5 s: it has the CPU for a tenth of the time."""
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


def test_a_stopped_process_is_found_at_once_and_goes_on(tmp_path: Path) -> None:
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
        until(lambda: examine(tmp_path) == [], what="a run that goes on")


def test_a_killed_process_is_found_at_once(tmp_path: Path) -> None:
    with living("rollout-0", tmp_path, IDLE) as process:
        process.kill()
        assert found(tmp_path, "dead").blocker == "rollout-0"
        assert process.wait() == -signal.SIGKILL


def test_a_blocked_loop_is_found_with_its_stack(tmp_path: Path) -> None:
    with living("rollout-0", tmp_path, BLOCKED):
        assert found(tmp_path, "blocked", where="in block").blocker == "rollout-0"
