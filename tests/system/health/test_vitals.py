"""Vitals of a process: also while it is blocked, cannot write, or exits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from arealite.system.health import vitals, waits
from arealite.system.health.waits import Wait
from tests.system.health.living import (
    BLOCKED,
    BLOCKED_UVLOOP,
    HEAD,
    IDLE,
    innermost,
    living,
    shown,
)
from tests.waiting import until


@contextlib.contextmanager
def recording(folder: Path) -> Iterator[vitals.Recorder]:
    """Make a recorder that is not started: the test calls `beat` or `start`."""
    recorder = vitals.Recorder("me-0", folder)
    try:
        yield recorder
    finally:
        if not recorder.is_alive():
            recorder.start()
        recorder.close()


@pytest.fixture(autouse=True)
def empty_tables(monkeypatch) -> Iterator[None]:
    """Hide the waits and event loops of other tests, and end a recorder that one of them left.

    Its next beat would reset the measured lag.
    """
    if vitals._recorder is not None:
        vitals._recorder.close()
    monkeypatch.setattr(vitals, "loops", [])
    monkeypatch.setattr(vitals, "_recorder", None)
    monkeypatch.setattr(waits, "table", set())
    yield
    if vitals._recorder is not None:
        vitals._recorder.close()


@pytest.fixture
def clock(monkeypatch) -> Any:
    """Clock of the vitals module; the test sets `clock.now`."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(vitals, "time", clock)
    return clock


def test_vitals_are_written_and_removed_at_a_normal_exit(tmp_path: Path) -> None:
    over = tmp_path / "over.log"
    script = f"while not os.path.exists({str(over)!r}): time.sleep(0.01)"
    with living("idle-0", tmp_path, script) as process:
        first = shown("idle-0", tmp_path)
        assert first["pid"] == process.pid
        assert vitals.process_state(process.pid)[1] == first["started"]
        until(lambda: shown("idle-0", tmp_path).get("clock", 0) > first["clock"], what="a beat")
        over.touch()
        assert process.wait(60) == 0
        assert not [file for file in tmp_path.iterdir() if file.suffix != ".log"]


def test_role_that_exits_survives_a_request_for_its_stacks(tmp_path: Path) -> None:
    """`arealite why` may send SIGUSR1 between any two steps of the exit."""
    script = (
        HEAD
        + """
import faulthandler
unregister = faulthandler.unregister
def unregister_and_request(signum):
    unregister(signum)
    os.kill(os.getpid(), signum)
faulthandler.unregister = unregister_and_request
vitals._recorder.close()
os.kill(os.getpid(), signal.SIGUSR1)
class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), signum=signal.SIGUSR1):
        kill(pid, signum)
        print("requested")
last = Last()  # is deleted after the interpreter has reset its signal handlers
"""
    )
    command = [sys.executable, "-c", script, "idle-0", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "requested\n"
    assert not list(tmp_path.iterdir())


def test_vitals_of_a_killed_process_remain(tmp_path: Path) -> None:
    with living("idle-0", tmp_path, IDLE) as process:
        process.kill()
        process.wait()
        assert shown("idle-0", tmp_path)["pid"] == process.pid
        assert vitals.process_state(process.pid) is None


async def test_equal_waits_are_grouped_with_count_and_oldest(tmp_path: Path) -> None:
    begin = time.monotonic()
    with recording(tmp_path) as recorder, contextlib.ExitStack() as stack:
        for number in range(300):
            what, on = f"g{number}/0", f"llm_server-{number % 2}"
            stack.enter_context(Wait(event=what, owner="llm client", on=on, seconds=60))
        wait = stack.enter_context(
            Wait(event="batch 3", owner="trainer rank 0", on="datapipe-0", replies_soon=True)
        )
        wait.since -= 9
        wait.last_sign -= 7
        wait.note_sign("2 of 8 groups")
        recorder.beat()
        first, *others = shown("me-0", tmp_path)["waits"]
        passed_s = time.monotonic() - begin
    assert (first["what"], first["on"], first["count"]) == ("batch 3", "datapipe-0", 1)
    assert first["detail"] == "2 of 8 groups" and first["replies_soon"]
    assert 9.0 <= first["waited_s"] <= 9.0 + passed_s and first["quiet_s"] <= passed_s
    assert [(w["what"], w["on"], w["count"]) for w in others] == [
        ("g0/0", "llm_server-0", 150),
        ("g1/0", "llm_server-1", 150),
    ]
    assert 60.0 - passed_s <= others[0]["seconds"] <= 60.0


async def test_lag_is_measured(tmp_path: Path) -> None:
    vitals.watch(asyncio.get_running_loop())
    await asyncio.sleep(0)
    time.sleep(0.3)  # noqa: ASYNC251  (blocks the event loop, which the test measures)
    await asyncio.sleep(0.15)
    with recording(tmp_path):
        seen = shown("me-0", tmp_path)
    assert seen["lag_s"] > 0.15
    assert vitals.lag_max_s() > 0.15


@pytest.mark.parametrize("script", [BLOCKED, BLOCKED_UVLOOP])
def test_blocked_loop_is_written_with_its_stack_and_logged_once(
    tmp_path: Path, script: str
) -> None:
    with living("loop-0", tmp_path, script):

        def is_seen() -> bool:
            seen = shown("loop-0", tmp_path)
            return seen["blocked_s"] > 2.5 and "in block" in innermost(seen["blocked_stack"])

        until(is_seen, what="a loop blocked for several beats")
        text = (tmp_path / "loop-0.log").read_text()
    assert text.count("event loop blocked") == 1
    assert "in main" in text and "in block" in text


def test_loop_that_runs_again_is_no_longer_blocked(tmp_path: Path, clock: Any) -> None:
    begun, over = threading.Event(), threading.Event()

    async def main() -> None:
        vitals.watch(asyncio.get_running_loop())
        begun.set()
        over.wait()  # blocks
        await asyncio.sleep(2 * vitals.TICK_S)
        blocked.append(recorder.vitals.blocked_s)
        recorder.beat()

    blocked: list[float] = []
    with recording(tmp_path) as recorder:
        thread = threading.Thread(target=asyncio.run, args=[main()])
        thread.start()
        begun.wait()
        clock.now += 1.0
        recorder.beat()
        assert recorder.vitals.blocked_s == 0.0, "not yet"
        clock.now += 1.0

        def is_seen() -> bool:
            recorder.beat()
            return "over.wait()  # blocks" in recorder.vitals.blocked_stack

        until(is_seen, what="a blocked loop")
        over.set()
        thread.join()
        assert blocked == [pytest.approx(2.0 - vitals.TICK_S)]
        assert recorder.vitals.blocked_s == 0.0 and not recorder.vitals.blocked_stack


def test_cpu_times_of_the_main_thread_are_from_when_all_loops_ran(
    tmp_path: Path, clock: Any, monkeypatch
) -> None:
    """The CPU times of the writing thread are current."""

    def cpu_times(pid: int, thread: int) -> vitals.CpuTimes:
        assert pid == os.getpid()
        return vitals.CpuTimes(clock=clock.now, ran_s=1.0, waited_s=2.0, num_slices=3.0)

    async def main() -> None:
        vitals.watch(asyncio.get_running_loop())
        begun.set()
        over.wait()  # blocks

    def beat(at: float) -> tuple[float, set[float]]:
        """Beat in another thread, as the recorder does.

        Returns:
            When the CPU times of the main thread were read, and those of other threads.
        """
        clock.now = at
        thread = threading.Thread(target=recorder.beat)
        thread.start()
        thread.join()
        stats = shown("me-0", tmp_path)["cpu"]
        return stats.pop(str(os.getpid()))[0], {now for now, *_ in stats.values()}

    monkeypatch.setattr(vitals, "cpu_times", cpu_times)
    begun, over = threading.Event(), threading.Event()
    with recording(tmp_path) as recorder:
        thread = threading.Thread(target=asyncio.run, args=[main()])
        thread.start()
        begun.wait()
        main_at, _ = beat(1001.0)
        assert main_at == 1001.0, "it is late, but not blocked yet"
        for now in (1002.0, 1003.0):
            main_at, others_at = beat(now)
            assert recorder.vitals.blocked_s > 1.0
            assert main_at == 1001.0 and max(others_at) == now
        over.set()
        thread.join()
        main_at, others_at = beat(1004.0)
        assert main_at == 1004.0 and max(others_at) == 1004.0


@pytest.mark.parametrize("stats", ["", "0 0 0\n", "no numbers at all", None])
def test_cpu_times_are_none_without_scheduler_statistics(
    tmp_path: Path, monkeypatch, stats: str | None
) -> None:
    monkeypatch.setattr(vitals, "PROC", tmp_path)
    (tmp_path / "1/task/2").mkdir(parents=True)
    file = tmp_path / "1/task/2/schedstat"
    file.write_text("2000000000 500000000 7\n")
    times = vitals.cpu_times(1, 2)
    assert times and (times.ran_s, times.waited_s, times.num_slices) == (2.0, 0.5, 7)
    file.unlink() if stats is None else file.write_text(stats)
    assert vitals.cpu_times(1, 2) is None


def test_stacks_are_written_on_request_and_equal_ones_grouped(tmp_path: Path) -> None:
    script = """
async def inner(): await asyncio.Event().wait()
async def outer(): await inner()
async def main():
    vitals.watch(asyncio.get_running_loop())
    all_wait = lambda: waits.counters.update(begun=1.0)  # all tasks are suspended now
    asyncio.get_running_loop().call_later(0.01, all_wait)
    await asyncio.gather(*(outer() for _ in range(40)))
asyncio.run(main())
"""
    with living("loop-0", tmp_path, script):
        until(lambda: "begun" in shown("loop-0", tmp_path)["counters"], what="tasks")
        (tmp_path / vitals.STACKS_REQUEST).touch()
        until((tmp_path / "loop-0.dump").exists, what="the stacks")
        lines = (tmp_path / "loop-0.dump").read_text().splitlines()
    (tasks,) = [line for line in lines if line.startswith("40 x task")]
    assert re.search(r"wait < <string>:\d+ inner < <string>:\d+ outer$", tasks)
    assert any("thread MainThread" in line and "main" not in line for line in lines)


def test_awake_time_restarts_after_a_stop(tmp_path: Path) -> None:
    with living("idle-0", tmp_path, IDLE) as process:
        until(lambda: shown("idle-0", tmp_path)["awake_s"] > 1.5, what="a process awake for long")
        process.send_signal(signal.SIGSTOP)
        until(lambda: (vitals.process_state(process.pid) or "?")[0] == "T", what="its stop")
        stopped = time.monotonic()
        until(lambda: time.monotonic() - stopped > 2.2 * vitals.BEAT_S, what="a long silence")
        resumed = time.monotonic()
        process.send_signal(signal.SIGCONT)
        until(
            lambda: shown("idle-0", tmp_path)["clock"] > resumed, what="a heartbeat after SIGCONT"
        )
        seen = shown("idle-0", tmp_path)
        assert seen["awake_s"] <= seen["clock"] - resumed, "from before it was stopped"


def test_rename_replaces_the_files_of_the_old_name(tmp_path: Path) -> None:
    vitals.start("me-0", tmp_path)
    vitals.rename("llm_server-8123")
    assert not shown("me-0", tmp_path)
    assert shown("llm_server-8123", tmp_path)["pid"] == os.getpid()
    assert vitals._recorder is not None
    vitals._recorder.close()
    assert not list(tmp_path.iterdir())


def test_heartbeat_is_renewed_on_a_full_disk(tmp_path: Path, monkeypatch) -> None:
    with recording(tmp_path) as recorder:
        file = tmp_path / "me-0.json"
        os.utime(file, (1.0, 1.0))

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(vitals.os, "replace", full)
            recorder.beat()
        assert time.time() - file.stat().st_mtime < 600.0, (
            "the old file has a new modification time"
        )


def test_failed_heartbeat_is_followed_by_the_next(tmp_path: Path, monkeypatch) -> None:
    beats: list[float] = []

    def fail(_: vitals.Recorder) -> None:
        beats.append(time.time())
        raise RuntimeError("any error")

    with recording(tmp_path) as recorder:
        monkeypatch.setattr(vitals, "BEAT_S", 0.01)
        monkeypatch.setattr(vitals.Recorder, "beat", fail)
        recorder.start()
        until(lambda: len(beats) > 2, what="beats")


def test_folder_that_cannot_be_made_is_only_logged(tmp_path: Path, capfd) -> None:
    (tmp_path / "file").write_text("")
    vitals.start("me-0", tmp_path / "file" / "vitals")
    vitals.rename("other")
    assert "no vitals" in "".join(capfd.readouterr())


async def test_1024_waits_of_two_kinds_are_two_groups(tmp_path: Path) -> None:
    with recording(tmp_path) as recorder, contextlib.ExitStack() as stack:
        for number in range(512):
            for what in (f"episode g{number}/0", f"g{number}/0/agent/0"):
                stack.enter_context(Wait(event=what, owner="x", on="llm_server-1", seconds=60))
        recorder.beat()
        shown = [wait for wait in recorder.vitals.waits if wait.on == "llm_server-1"]
    assert sorted(wait.count for wait in shown) == [512, 512]
