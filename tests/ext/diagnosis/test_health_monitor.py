"""The health monitor with real processes: it kills an unresponsive child, and nothing else."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import psutil
import pytest

from arealite.api.findings import Cause, Finding
from arealite.ext.diagnosis import health_monitor
from arealite.ext.diagnosis.health_monitor import HealthMonitor, describe
from arealite.impl.launcher.processes import Child
from arealite.impl.launcher.supervisor import Role, Supervisor
from tests.waiting import until

SHOWS = """
import sys, threading
from pathlib import Path
from arealite.system.health import vitals
vitals.start(sys.argv[2], Path(sys.argv[1]))
threading.Event().wait(600)
"""


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes that write vitals and are then stopped."""
    found = [
        subprocess.Popen([sys.executable, "-c", SHOWS, str(tmp_path), name], start_new_session=True)
        for name in ("rollout-0", "rollout-1")
    ]
    try:
        until(lambda: len(list(tmp_path.glob("rollout-*.json"))) == 2, what="vitals")
        for process in found:
            process.send_signal(signal.SIGSTOP)
        told = [psutil.Process(process.pid) for process in found]
        until(lambda: {each.status() for each in told} == {psutil.STATUS_STOPPED}, what="the stop")
        yield found
    finally:
        for process in found:
            process.kill()
            process.wait()


class Watched(Supervisor):
    """Reports every finding; `child` maps a finding to a child."""

    def __init__(
        self, child: Callable[[Finding], Child | None], say: Callable[[str], object]
    ) -> None:
        super().__init__(say)
        self.child = child

    async def start(self, role: Role) -> None:
        raise NotImplementedError

    def is_needed(self, role: Role, dead: Child) -> bool:
        raise NotImplementedError

    def mark(self) -> float:
        raise NotImplementedError

    def child_of(self, finding: Finding) -> Child | None:
        return self.child(finding)

    def is_shown(self, finding: Finding) -> bool:
        return True


def as_child(process: subprocess.Popen[bytes]) -> Child:
    """Return a process as a child of a supervisor."""
    return Child(
        name="rollout", process=cast(asyncio.subprocess.Process, process), log=None, log_begin=0
    )


def monitor_of(folder: Path, supervisor: Supervisor, *, silent_s: float = 8.0) -> HealthMonitor:
    return HealthMonitor(folder=folder, supervisor=supervisor, silent_s=silent_s, blocked_s=60.0)


async def test_only_a_child_is_killed(
    tmp_path: Path, stopped: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(health_monitor, "EXAMINE_S", 0.05)
    mine, other = stopped
    said: list[str] = []
    looked_again = asyncio.Event()

    def say(text: str) -> None:
        said.append(text)
        if text.startswith("rollout-0 is dead: "):
            looked_again.set()

    def child(finding: Finding) -> Child | None:
        return as_child(mine) if finding.pid == mine.pid and mine.poll() is None else None

    of_mine = monitor_of(tmp_path, Watched(child, say), silent_s=0.5)
    watching = asyncio.ensure_future(of_mine.run())
    try:
        assert await asyncio.wait_for(asyncio.to_thread(mine.wait), 60) == -signal.SIGKILL
        await asyncio.wait_for(looked_again.wait(), 60)
    finally:
        watching.cancel()
    assert psutil.Process(other.pid).status() == psutil.STATUS_STOPPED
    for name in ("rollout-0", "rollout-1"):
        lines = [line for line in said if line.startswith(f"{name} is stopped: ")]
        assert len(lines) == 1, "said once"
    killed = [line.split()[0] for line in said if "is killed after" in line]
    assert {*killed} == {"rollout-0"}, "again, if it is not gone when it is looked at next"


async def test_child_of_a_dead_role_is_killed(
    tmp_path: Path, stopped: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
):
    """The child is an srun that was stopped before its step ended."""
    monkeypatch.setattr(health_monitor, "EXAMINE_S", 0.05)
    role, waiter = stopped
    role.kill()
    role.wait()
    of_role = monitor_of(
        tmp_path,
        Watched(lambda f: as_child(waiter) if f.blocker == "rollout-0" else None, print),
        silent_s=0.5,
    )
    watching = asyncio.ensure_future(of_role.run())
    try:
        assert await asyncio.wait_for(asyncio.to_thread(waiter.wait), 60) == -signal.SIGKILL
    finally:
        watching.cancel()


async def test_starved_child_is_reported_and_not_killed(
    tmp_path: Path, stopped: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
):
    """A new process would get no CPU either."""
    monkeypatch.setattr(health_monitor, "EXAMINE_S", 0.01)
    starved = Finding(
        blocker="rollout-0",
        cause="starved",
        since_s=999.0,
        detail="it waited for a CPU",
        pid=stopped[0].pid,
    )
    looks, enough = list[Path](), asyncio.Event()
    loop = asyncio.get_running_loop()

    def examine(folder: Path) -> list[Finding]:
        looks.append(folder)
        if len(looks) == 4:
            loop.call_soon_threadsafe(enough.set)
        return [starved]

    monkeypatch.setattr(health_monitor, "examine", examine)
    said: list[str] = []
    watching = asyncio.ensure_future(
        monitor_of(tmp_path, Watched(lambda f: as_child(stopped[0]), said.append)).run()
    )
    await asyncio.wait_for(enough.wait(), 60)
    watching.cancel()
    assert said == ["rollout-0 is starved: it waited for a CPU"]
    assert stopped[0].poll() is None


@pytest.mark.parametrize("cause", ["filtering", "paused"])
def test_lasting_finding_of_filtered_groups_is_reported_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: Cause
):
    """The run goes on sampling in vain; other findings are reported once."""
    now = 1000.0
    monkeypatch.setattr(health_monitor.time, "monotonic", lambda: now)
    said: list[str] = []
    monitor = monitor_of(tmp_path, Watched(lambda finding: None, said.append))
    for second in range(700):
        now = 1000.0 + second
        monitor._report(
            Finding(
                blocker="datapipe-0", cause=cause, since_s=float(second), detail=f"{second} groups"
            )
        )
    reminders = ["301", "602"] if cause == "filtering" else []
    assert said == [f"datapipe-0 is {cause}: {second} groups" for second in ["0", *reminders]]


async def test_failed_examination_does_not_end_the_monitor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    looks = asyncio.Event()
    loop = asyncio.get_running_loop()

    def examine(folder: Path) -> list[Finding]:
        if (tmp_path / "looked").exists():
            loop.call_soon_threadsafe(looks.set)
        (tmp_path / "looked").touch()
        raise OSError("the folder is gone")

    monkeypatch.setattr(health_monitor, "EXAMINE_S", 0.01)
    monkeypatch.setattr(health_monitor, "examine", examine)
    watching = asyncio.ensure_future(
        monitor_of(tmp_path, Watched(lambda finding: None, print)).run()
    )
    await asyncio.wait_for(looks.wait(), 60)
    watching.cancel()


def test_line_of_a_finding_has_role_cause_place_and_waiters():
    stack = '  File "/a.py", line 3, in run\n    f()\n  File "/my/env.py", line 7, in f\n    spin\n'
    finding = Finding(
        blocker="rollout-0",
        cause="blocked",
        since_s=9.0,
        detail="its loop runs nothing",
        stack=stack,
        waiters=("x", "y", "z"),
    )
    text = describe(finding)
    assert text == (
        "rollout-0 is blocked: its loop runs nothing (at /my/env.py:7 in f); waiting: x and 2 more"
    )
    assert describe(Finding(blocker="a", cause="dead", since_s=1.0, detail="b")) == "a is dead: b"
