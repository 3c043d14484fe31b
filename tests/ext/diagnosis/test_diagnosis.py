"""`examine` finds the blockers in hand-written vitals; test_blockers uses real processes."""

from __future__ import annotations

import re
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from arealite.api.findings import Finding
from arealite.ext.diagnosis.diagnosis import examine
from arealite.system.health import vitals
from arealite.system.health.vitals import Waits
from arealite.system.health.waits import GROUP_FILTER, OTHER_RANKS, PAUSE_OBSERVER, SUPERVISOR
from tests.system.health.living import MY_START, show, wait

pytestmark = pytest.mark.usefixtures("still")


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


# ---------------------------------------------------------------- roles that block no other


def test_healthy_run_has_no_findings(tmp_path: Path) -> None:
    """Every role has a long wait, as in a healthy run."""
    show(tmp_path, "datapipe-0")
    show(
        tmp_path,
        "trainer-0",
        wait("EvalRequest 40", "datapipe-0", 240.0, quiet_s=0.9, replies_soon=True),
        counters={"ranks": 2, "collectives": 7},
    )
    show(
        tmp_path,
        "trainer-1",
        wait("collective 8", OTHER_RANKS, 240.0),
        counters={"ranks": 2, "collectives": 8},
    )
    show(
        tmp_path,
        "rollout-0",
        wait("g3/0", "llm_server-a", 200.0, seconds=300.0, count=256),
        wait("episode g3/0", "environment math", 250.0, seconds=600.0, count=256),
    )
    show(tmp_path, "rollout-1", wait("a lease", "datapipe-0", 900.0))
    show(tmp_path, "llm_server-a")
    assert examine(tmp_path) == []


def test_trainer_in_a_long_step_is_no_blocker(tmp_path: Path) -> None:
    show(tmp_path, "trainer-0", counters={"ranks": 2, "collectives": 7})
    counters = {"ranks": 2, "collectives": 8}
    show(tmp_path, "trainer-1", wait("collective 8", OTHER_RANKS, 90.0), counters=counters)
    show(tmp_path, "rollout-0", wait("a lease", "datapipe-0", 90.0))
    show(tmp_path, "datapipe-0")
    assert examine(tmp_path) == []


def test_empty_folder_and_broken_files_give_no_findings(tmp_path: Path) -> None:
    assert examine(tmp_path / "none") == []
    (tmp_path / "x.json").write_text("{")
    (tmp_path / ".datapipe-0.json").write_text("half")
    assert examine(tmp_path) == []


# ---------------------------------------------------------------- blockers


def test_role_without_a_beat_is_silent_and_has_all_waiters(tmp_path: Path) -> None:
    """Indirect waiters count, and a wait whose `detail` names the role."""
    show(tmp_path, "rollout-1", wait("g3/0", "llm_server-a", 9.0), age_s=6.0)
    show(tmp_path, "datapipe-0")
    detail = "batch 12: 3 of 8 groups, 13 episodes in flight (13 on rollout-1@host)"
    asks = wait("BatchRequest 12", "datapipe-0", 8.0, quiet_s=0.5, replies_soon=True, detail=detail)
    show(tmp_path, "trainer-0", asks, counters={"ranks": 2, "collectives": 7})
    meets = wait("collective 8", OTHER_RANKS, 8.0)
    show(tmp_path, "trainer-1", meets, counters={"ranks": 2, "collectives": 8})
    show(tmp_path, "rollout-10", wait("a lease", "datapipe-0", 8.0))
    finding = only(examine(tmp_path))
    assert (finding.blocker, finding.cause) == ("rollout-1", "silent")
    assert finding.since_s == pytest.approx(6.0, abs=0.1)
    assert [waiter.split(",")[0] for waiter in finding.waiters] == [
        "trainer-0: BatchRequest 12",
        "trainer-1: collective 8",
    ]


def test_server_paused_by_another_client_is_found_at_once(tmp_path: Path) -> None:
    """A client that waits for the server does not become the blocker."""
    show(tmp_path, "llm_server-a")
    show(tmp_path, "rollout-0", wait("g3/0", "llm_server-a", 9.0, seconds=300.0, count=256))
    why = "by a client that is not this trial's publisher"
    seen = wait("its continuation", "llm_server-a", 1.5, owner=PAUSE_OBSERVER, detail=why)
    show(tmp_path, "trainer-0", seen)
    finding = only(examine(tmp_path))
    assert (finding.blocker, finding.cause) == ("llm_server-a", "paused")
    assert finding.since_s == pytest.approx(1.5, abs=0.1)
    assert finding.waiters == ("rollout-0: g3/0 (and 255 more), 9.0 s",)
    assert finding.detail == why


def test_blocked_loop_is_found_with_its_stack_after_the_limit(tmp_path: Path) -> None:
    show(tmp_path, "rollout-0", blocked_s=2.0, blocked_stack="File x")
    assert examine(tmp_path) == []
    show(tmp_path, "rollout-0", blocked_s=2.5, blocked_stack="File x", age_s=0.9)
    finding = only(examine(tmp_path))
    assert (finding.blocker, finding.cause, finding.stack) == ("rollout-0", "blocked", "File x")


def test_rank_that_exited_before_a_collective_is_dead(tmp_path: Path) -> None:
    counters = {"ranks": 3, "collectives": 8}
    for rank in (0, 2):
        show(tmp_path, f"trainer-{rank}", wait("collective 8", OTHER_RANKS, 3), counters=counters)
    finding = only(examine(tmp_path))
    assert (finding.blocker, finding.cause) == ("trainer-1", "dead")
    assert len(finding.waiters) == 2


def test_ranks_that_exit_half_a_second_apart_give_no_finding(tmp_path: Path) -> None:
    counters = {"ranks": 2, "collectives": 8}
    show(tmp_path, "trainer-0", wait("collective 8", OTHER_RANKS, 0.5), counters=counters)
    assert examine(tmp_path) == []


def test_live_server_that_does_not_reply_is_overdue(tmp_path: Path) -> None:
    show(tmp_path, "llm_server-a")
    show(
        tmp_path,
        "rollout-0",
        wait("g3/0", "llm_server-a", 8.0, seconds=300.0, count=40),
        wait("its version", "llm_server-a", 1.0, quiet_s=6.0, replies_soon=True),
    )
    finding = only(examine(tmp_path))
    assert (finding.blocker, finding.cause) == ("llm_server-a", "overdue")
    assert finding.waiters[0].startswith("rollout-0: g3/0 (and 39 more), 8.0 s")
    assert examine(tmp_path, overdue_s=7.0) == []


def test_chain_of_waits_is_followed_to_its_end(tmp_path: Path) -> None:
    """The wrapper of a server does not reply because its SGLang does not reply."""
    show(tmp_path, "trainer-0", wait("a continue", "llm_server-a", 7.0, replies_soon=True))
    show(tmp_path, "llm_server-a", wait("/model_info", "SGLang http://a", 6.0, replies_soon=True))
    finding = only(examine(tmp_path))
    assert (finding.blocker, finding.cause) == ("SGLang http://a", "overdue")
    assert [waiter.split(":")[0] for waiter in finding.waiters] == ["llm_server-a", "trainer-0"]


def test_waiter_for_a_blocker_is_no_blocker(tmp_path: Path) -> None:
    show(tmp_path, "trainer-0", wait("Published 3", "datapipe-0", 7.0, replies_soon=True))
    show(tmp_path, "datapipe-0", age_s=6.0)
    finding = only(examine(tmp_path))
    assert (finding.blocker, finding.cause) == ("datapipe-0", "silent")
    assert len(finding.waiters) == 1


@pytest.mark.parametrize("woken", ["trainer-0", "datapipe-0"])
def test_resumed_process_has_time_to_reply(tmp_path: Path, woken: str) -> None:
    asks = wait("BatchRequest 3", "datapipe-0", 60.0, replies_soon=True)
    for awake_s, count in ((3.0, 0), (5.5, 1)):
        show(tmp_path, "trainer-0", asks, awake_s=awake_s if woken == "trainer-0" else 1000.0)
        show(tmp_path, "datapipe-0", awake_s=awake_s if woken == "datapipe-0" else 1000.0)
        assert len(examine(tmp_path)) == count


def test_cycle_of_two_waits_ends_the_search(tmp_path: Path) -> None:
    show(tmp_path, "a-0", wait("x", "b-0", 7.0, replies_soon=True))
    show(tmp_path, "b-0", wait("y", "a-0", 7.0, replies_soon=True))
    assert examine(tmp_path)


def test_awaited_role_without_vitals_is_dead(tmp_path: Path) -> None:
    show(tmp_path, "trainer-0", wait("BatchRequest 3", "datapipe-0", 6.0, replies_soon=True))
    finding = only(examine(tmp_path))
    assert (finding.blocker, finding.cause) == ("datapipe-0", "dead")


def test_role_of_another_host_is_judged_by_its_heartbeat_alone(tmp_path: Path) -> None:
    show(tmp_path, "rollout-0", host="elsewhere", pid=2**22 + 1, started=1, clock=0.0, age_s=6.0)
    assert examine(tmp_path) == []
    show(tmp_path, "rollout-0", host="elsewhere", pid=2**22 + 1, started=1, clock=0.0, age_s=20.0)
    assert only(examine(tmp_path)).cause == "silent"


def test_reused_pid_means_death_and_old_deaths_are_forgotten(tmp_path: Path) -> None:
    show(tmp_path, "rollout-0", started=MY_START - 1, age_s=3.0)
    assert only(examine(tmp_path)).cause == "dead"
    show(tmp_path, "rollout-0", started=MY_START - 1, age_s=100.0)
    assert examine(tmp_path) == []
    show(tmp_path, "trainer-0", wait("x", "rollout-0", 1.0))
    assert only(examine(tmp_path)).cause == "dead", "a role waits for it"


@pytest.mark.parametrize("host", [socket.gethostname(), "elsewhere"])
@pytest.mark.parametrize("apart_s", [-3600.0, 3600.0])
def test_wrong_clock_neither_makes_a_role_silent_nor_hides_a_silent_one(
    tmp_path: Path, monkeypatch, apart_s: float, host: str
) -> None:
    show(tmp_path, "rollout-0", host=host, age_s=1.0)
    show(tmp_path, "rollout-1", host=host, age_s=20.0)
    here = time.time
    monkeypatch.setattr(time, "time", lambda: here() + apart_s)
    finding = only(examine(tmp_path))
    assert (finding.blocker, finding.cause) == ("rollout-1", "silent")
    assert 19.9 < finding.since_s < 30.0


def test_full_disk_is_reported_instead_of_silent_roles(tmp_path: Path, monkeypatch) -> None:
    show(tmp_path, "rollout-0", age_s=20.0)
    show(tmp_path, "trainer-0", age_s=20.0)
    assert [finding.cause for finding in examine(tmp_path)] == ["silent", "silent"]

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    finding = only(examine(tmp_path))
    assert finding.blocker == str(tmp_path) and "No space left" in finding.detail


def test_findings_are_sorted_by_cause(tmp_path: Path) -> None:
    show(tmp_path, "a-0", blocked_s=9.0)
    show(tmp_path, "b-0", age_s=9.0)
    show(tmp_path, "c-0", started=1, age_s=1.0)
    assert [f.cause for f in examine(tmp_path)] == ["dead", "silent", "blocked"]


# ---------------------------------------------------------------- CPU starvation

MAIN, BEATS = 11, 12
"""Ids of the main thread and of the vitals thread."""
ThreadStats = tuple[str, float, float, int]
"""Kernel state of a thread; since the vitals: seconds on a CPU, in the run queue, time slices."""
IN_C_CODE: ThreadStats = ("R", 4.1, 0.1, 300)
ASLEEP: ThreadStats = ("S", 0.0, 0.0, 1)
ASKS_IN_VAIN: ThreadStats = ("R", 0.1, 4.1, 90)
"""Wakes up for the GIL, and waits for a CPU each time."""
NEVER_RUN: ThreadStats = ("R", 0.001, 0.0, 2)
PREEMPTED: ThreadStats = ("R", 0.5, 3.8, 300)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch) -> Path:
    """Fake /proc folder."""
    monkeypatch.setattr(vitals, "PROC", tmp_path / "proc")
    return tmp_path / "proc"


def write_stats(
    kernel: Path, main: ThreadStats, beats: ThreadStats, *, ages_s: tuple[float, float]
) -> Any:
    """Write the scheduler statistics of a process, `ages_s` seconds after its vitals.

    Returns:
        The fields of these vitals.
    """
    written = dict[int, tuple[float, ...]]()
    for thread, stats, age_s in zip((MAIN, BEATS), (main, beats), ages_s, strict=True):
        state, ran_s, waited_s, turns = stats
        folder = kernel / f"{MAIN}/task/{thread}"
        folder.mkdir(parents=True)
        (folder / "stat").write_text(f"{thread} (a) b) {state}{' 0' * 18} 7 0\n")
        numbers = int((2.0 + ran_s) * 1e9), int((3.0 + waited_s) * 1e9), 50 + turns
        (folder / "schedstat").write_text("{} {} {}\n".format(*numbers))
        written[thread] = (time.monotonic() - age_s, 2.0, 3.0, 50)
    return {"pid": MAIN, "started": 7, "cpu": written}


@pytest.mark.parametrize(
    ("main", "beats", "age_s", "cause"),
    [
        (ASLEEP, NEVER_RUN, 4.4, "starved"),
        (PREEMPTED, ASKS_IN_VAIN, 4.4, "starved"),
        (NEVER_RUN, ASKS_IN_VAIN, 4.4, "starved"),
        (IN_C_CODE, ASKS_IN_VAIN, 4.4, "silent"),
        (ASLEEP, ASKS_IN_VAIN, 4.4, "silent"),
        (ASLEEP, ASLEEP, 4.4, "silent"),  # blocked by the disk
        (PREEMPTED, ASKS_IN_VAIN, 9.0, "silent"),
        (("T", 0.0, 4.0, 9), NEVER_RUN, 4.4, "stopped"),
        (("Z", 0.0, 4.0, 9), NEVER_RUN, 4.4, "dead"),
    ],
)
def test_role_that_is_silent_without_a_cpu_is_starved(
    tmp_path: Path, kernel: Path, main: ThreadStats, beats: ThreadStats, age_s: float, cause: str
) -> None:
    known = write_stats(kernel, main, beats, ages_s=(age_s, age_s))
    show(tmp_path, "rollout-0", age_s=age_s, **known)
    finding = only(examine(tmp_path))
    assert finding.cause == cause
    if cause == "starved":
        words = r"pid 11 waited for a CPU for (86|100)% of 4\.4 s \(load \d+, \d+ CPUs: run .*\)"
        assert re.fullmatch(words, finding.detail)
    if cause == "silent":
        where = f"C code or the kernel blocks its interpreter (state {main[0]})"
        assert finding.detail.endswith(where)


def test_without_scheduler_statistics_a_silent_role_may_be_starved(
    tmp_path: Path, kernel: Path
) -> None:
    known = write_stats(kernel, NEVER_RUN, NEVER_RUN, ages_s=(4.4, 4.4))
    show(tmp_path, "rollout-2", age_s=20.0, host="elsewhere", **known)
    found = examine(tmp_path)  # the statistics are of another host's process
    (tmp_path / "rollout-2.json").unlink()
    for file in kernel.glob("*/task/*/schedstat"):
        file.unlink()
    show(tmp_path, "rollout-0", age_s=4.4, **known | {"cpu": {MAIN: None, BEATS: None}})
    show(tmp_path, "rollout-1", age_s=4.4, **known)
    found += examine(tmp_path)
    assert [finding.cause for finding in found] == ["silent"] * 3
    for finding in found:
        where = "C code or the kernel blocks its interpreter, or it gets no CPU (state "
        assert where in finding.detail


@pytest.mark.parametrize(
    ("main", "blocked_s", "written_s", "cause"),
    [
        (PREEMPTED, 3.5, 4.3, "starved"),
        (
            ("R", 0.3, 2.4, 200),
            3.5,
            2.7,
            "starved",
        ),  # its statistics were written after it became late
        (("R", 3.0, 27.0, 900), 30.0, 30.8, "blocked"),  # it computed for 3 s
        (ASLEEP, 3.5, 4.3, "blocked"),
        (IN_C_CODE, 3.5, 4.3, "blocked"),
    ],
)
def test_loop_without_a_cpu_is_starved_and_not_blocked(
    tmp_path: Path, kernel: Path, main: ThreadStats, blocked_s: float, written_s: float, cause: str
) -> None:
    """The state of the vitals thread does not matter here."""
    known = write_stats(kernel, main, NEVER_RUN, ages_s=(written_s, 0.9))
    written = {"blocked_s": blocked_s - 0.9, "blocked_stack": "File x"}
    show(tmp_path, "rollout-0", age_s=0.9, **known, **written)
    finding = only(examine(tmp_path))
    assert (finding.cause, finding.stack) == (cause, "File x")
    if cause == "blocked":
        assert finding.detail.endswith("pid 11 runs no task, because a call does not return")


def kept(name: str, what: str, waited_s: float, why: str = "") -> Waits:
    return wait(what, name, waited_s, owner=SUPERVISOR, detail=why)


def test_role_that_its_parent_starts_is_starting(tmp_path: Path):
    show(tmp_path, "launcher-0", kept("rollout-0", "start", 0.5))
    finding = only(examine(tmp_path))
    assert (finding.blocker, finding.cause) == ("rollout-0", "starting")
    assert finding.detail == "start: the process is not ready yet"
    assert not finding.waiters, "the launcher waits for nothing else"


def test_crash_loop_is_found_with_its_last_death_and_its_waiters(tmp_path: Path):
    show(tmp_path, "launcher-0", kept("datapipe-0", "restart 2 of 5", 1.0, "died (exit code 1)"))
    show(tmp_path, "trainer-0", wait("batch 7", "datapipe-0", 30.0, replies_soon=True))
    finding = only(examine(tmp_path))
    assert (finding.blocker, finding.cause) == ("datapipe-0", "crashing")
    assert finding.detail == "restart 2 of 5: died (exit code 1)"
    assert [waiter.partition(",")[0] for waiter in finding.waiters] == ["trainer-0: batch 7"]


def test_restarted_role_is_not_dead_and_its_new_finding_has_precedence(tmp_path: Path):
    why = "rollout-0 died (killed by SIGKILL)"
    show(tmp_path, "launcher-0", kept("rollout-0", "restart 1 of 5", 1.0, why))
    show(tmp_path, "rollout-0", started=MY_START + 1, age_s=1.0)
    assert only(examine(tmp_path)).cause == "crashing", (
        "the vitals of the dead process are still there"
    )
    show(tmp_path, "rollout-0", blocked_s=900.0)
    assert only(examine(tmp_path)).cause == "blocked"


def test_dead_launcher_restarts_no_role(tmp_path: Path):
    show(tmp_path, "launcher-0", kept("rollout-0", "start", 0.5), started=MY_START + 1, age_s=1.0)
    assert only(examine(tmp_path)).blocker == "launcher-0"


# ---------------------------------------------------------------- all groups are filtered


def test_datapipe_that_filters_every_group_is_found_with_its_waiters(tmp_path: Path) -> None:
    """All processes work, but the trainer waits for ever."""
    detail = "64 groups in a row were filtered, and none was completed: 64 zero_variance."
    report = wait("a group that is not filtered", "datapipe-0", 3.0, owner=GROUP_FILTER)
    report.detail = detail
    show(tmp_path, "datapipe-0", report)
    show(tmp_path, "rollout-0", wait("episode g64/0", "environment math", 0.1, seconds=600.0))
    asks = wait("BatchRequest 0", "datapipe-0", 60.0, quiet_s=0.5, replies_soon=True)
    show(tmp_path, "trainer-0", asks)
    finding = only(examine(tmp_path))
    assert (finding.blocker, finding.cause) == ("datapipe-0", "filtering")
    assert finding.detail == detail
    assert finding.waiters == ("trainer-0: BatchRequest 0, 60.0 s",)
