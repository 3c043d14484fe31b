"""Finds the roles that block a run, from the vitals of all roles.

The functions have no side effects. The launcher, which kills blocked processes, and `arealite why`
use them, so both report the same findings.
"""

import math
import os
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import get_args

from arealite.api.findings import Cause, Finding
from arealite.base.errors import UserError
from arealite.base.folder_checks import check_folder
from arealite.system.health.vitals import (
    BEAT_S,
    FORGET_DEAD_S,
    RoleStatus,
    Waits,
    cpu_times,
    process_state,
    read_roles,
)
from arealite.system.health.waits import (
    GROUP_FILTER,
    ITSELF,
    OTHER_RANKS,
    PAUSE_OBSERVER,
    SUPERVISOR,
)

ORDER: tuple[Cause, ...] = get_args(Cause)

REPORTS: dict[str, Cause] = {PAUSE_OBSERVER: "paused", GROUP_FILTER: "filtering"}
"""The cause that a wait reports, by the owner of the wait: the role itself has found it."""

SILENT_S = 4.0
REMOTE_SILENT_S = 15.0
BLOCKED_S = 3.0
OVERDUE_S = 5.0
MAX_BUSY_S = 1.0
"""A process that was late for more seconds than this without waiting for a CPU is not starved."""
FEW_TIMESLICES = 20
"""A thread blocked on the GIL wakes about 200 times a second; fewer time slices than this mean CPU
starvation."""
ABSENT_S = 2.0
"""After a wait of this long, a role without vitals is regarded as absent."""
ROLE = re.compile(r"\b(?:datapipe|rollout|trainer)-\d+\b")


def _finding_about(role: RoleStatus, *, silent_s: float, blocked_s: float) -> Finding | None:
    """Return the finding about one role alone; None if the role is healthy."""
    pid = role.vitals.pid
    if role.state in ("T", "t"):
        return _stopped(role.name, role.age_s, pid)
    if role.state in ("X", "Z"):
        return Finding(
            blocker=role.name,
            cause="dead",
            since_s=role.age_s,
            detail=f"pid {pid} crashed or was killed",
        )
    is_silent = role.age_s > silent_s
    loop_blocked_s = role.vitals.blocked_s + role.age_s if role.vitals.blocked_s else 0.0
    if not is_silent and loop_blocked_s <= blocked_s:
        return None
    late_s = role.age_s if is_silent else loop_blocked_s
    cpu_wait_share = _cpu_wait_share(role, late_s)
    if cpu_wait_share and late_s * (1.0 - cpu_wait_share) <= MAX_BUSY_S:
        return _starved(role, late_s, cpu_wait_share)
    if is_silent:
        return _silent(role, is_cpu_wait_unknown=cpu_wait_share is None)
    return Finding(
        blocker=role.name,
        cause="blocked",
        since_s=loop_blocked_s,
        detail=f"the event loop of pid {pid} runs no task, because a call does not return",
        stack=role.vitals.blocked_stack,
    )


def _starved(role: RoleStatus, late_s: float, cpu_wait_share: float) -> Finding:
    pid = role.vitals.pid
    load = f"load {os.getloadavg()[0]:.0f}, {os.cpu_count()} CPUs: run fewer processes"
    detail = f"pid {pid} waited for a CPU for {cpu_wait_share:.0%} of {late_s:.1f} s ({load})"
    return Finding(
        blocker=role.name,
        cause="starved",
        since_s=late_s,
        detail=detail,
        stack=role.vitals.blocked_stack,
    )


def _silent(role: RoleStatus, *, is_cpu_wait_unknown: bool) -> Finding:
    detail = f"pid {role.vitals.pid} on {role.vitals.host} exists, but writes no vitals: "
    detail += "C code or the kernel blocks its interpreter"
    if is_cpu_wait_unknown:
        detail += ", or it gets no CPU"
    detail += f" (state {role.state or 'unknown'})"
    return Finding(
        blocker=role.name,
        cause="silent",
        since_s=role.age_s,
        detail=detail,
    )


def _cpu_wait_share(role: RoleStatus, late_s: float) -> float | None:
    """Return the share of `late_s` in which the process waited for a CPU, from 0 to 1.

    The main thread, which may hold the GIL, and the thread that writes the vitals are examined;
    the larger share counts. The kernel does not count a wait that has not ended. Therefore, a
    runnable thread with at most FEW_TIMESLICES since its vitals were written counts as waiting.

    Returns:
        None if the kernel has no scheduler statistics of the process.
    """
    share = 0.0
    pid = role.vitals.pid
    for thread, before in role.vitals.cpu.items():
        now = cpu_times(pid, thread) if role.state else None
        if before is None or now is None:
            return None
        passed_s = now.clock - before.clock
        ran_s = now.ran_s - before.ran_s
        waited_s = now.waited_s - before.waited_s
        num_slices = now.num_slices - before.num_slices
        is_main = thread == pid
        sleep_s = 0.0 if is_main else BEAT_S
        if is_main:
            share = max(share, waited_s / min(late_s, passed_s))
        if num_slices <= FEW_TIMESLICES and _is_runnable(pid, thread):
            share = max(share, (passed_s - sleep_s - ran_s) / (late_s - sleep_s))
    return min(1.0, share)


def _stopped(name: str, since_s: float, pid: int) -> Finding:
    return Finding(
        blocker=name,
        cause="stopped",
        since_s=since_s,
        detail=f"SIGSTOP or a debugger stopped pid {pid}; kill -CONT {pid} continues it",
        pid=pid,
    )


def _is_runnable(pid: int, thread: int) -> bool:
    """Return whether a thread runs, or waits for a CPU."""
    process = process_state(pid, thread)
    return process is not None and process[0] == "R"


def examine(
    folder: Path,
    *,
    silent_s: float = SILENT_S,
    blocked_s: float = BLOCKED_S,
    overdue_s: float = OVERDUE_S,
    roles: Sequence[RoleStatus] | None = None,
) -> list[Finding]:
    """Return the roles that block the run, the worst cause first.

    Args:
        folder: Folder of the vitals.
        silent_s: Age of a heartbeat after which a role is silent.
        blocked_s: Seconds without a callback after which an event loop is blocked.
        overdue_s: Seconds without a sign of life after which a reply is overdue.
        roles: The roles, if they were read already; None: read `folder`.
    """
    if roles is None:
        roles = read_roles(folder)
    roles_by_name = {role.name: role for role in roles}
    findings: dict[str, Finding] = {}
    for role in roles_by_name.values():
        is_remote = not role.state
        limit_s = max(silent_s, REMOTE_SILENT_S) if is_remote else silent_s
        finding = _finding_about(role, silent_s=limit_s, blocked_s=blocked_s)
        if finding is not None:
            pid = 0 if is_remote else role.vitals.pid
            findings[role.name] = replace(finding, pid=pid)
    findings = _blame_unwritable_folder(folder, findings)
    graph = WaitGraph(roles_by_name, unhealthy=findings)
    restarted = {finding.blocker: finding for finding in graph.restarted()}
    for name, finding in restarted.items():
        if name not in findings or findings[name].cause == "dead":
            findings[name] = finding
    further = chain(
        graph.reported(),
        graph.absent(),
        graph.overdue(overdue_s),
        graph.slow(),
    )
    for finding in further:
        findings.setdefault(finding.blocker, finding)
    complete = [
        replace(finding, waiters=tuple(graph.waiters(name))) for name, finding in findings.items()
    ]
    return sorted(filter(_is_relevant, complete), key=_severity)


def _blame_unwritable_folder(folder: Path, findings: dict[str, Finding]) -> dict[str, Finding]:
    """Replace the findings about silent roles if no role can write its vitals.

    Such a role may be healthy: the disk of the folder is full or is away.
    """
    silent = {name for name, finding in findings.items() if finding.cause == "silent"}
    if not silent:
        return findings
    try:
        check_folder(folder, "the folder of vitals", "cluster.name_root")
    except UserError as error:
        others = {name: finding for name, finding in findings.items() if name not in silent}
        blocker = str(folder)
        others[blocker] = Finding(
            blocker=blocker,
            cause="overdue",
            since_s=0.0,
            detail=f"no role can write: {error}",
        )
        return others
    return findings


def _is_relevant(finding: Finding) -> bool:
    """Return whether to report a finding: a role that died long ago matters only to waiters."""
    is_old_death = finding.cause == "dead" and finding.since_s >= FORGET_DEAD_S
    return bool(finding.waiters) or not is_old_death


def _severity(finding: Finding) -> tuple[int, int, float]:
    """Return the sort key that puts the worst cause, then the most waiters, first."""
    return ORDER.index(finding.cause), -len(finding.waiters), -finding.since_s


class WaitGraph:
    """The waits of all roles, except those of unhealthy roles."""

    def __init__(self, roles: dict[str, RoleStatus], *, unhealthy: Container[str] = ()) -> None:
        self.roles = roles
        self.all = [
            (role, wait, self.targets(role, wait))
            for role in roles.values()
            if role.name not in unhealthy
            for wait in sorted(role.vitals.waits, key=lambda wait: -wait.waited_s)
        ]

    def restarted(self) -> Iterator[Finding]:
        """Find roles whose parent starts or restarts them, and roles stopped meanwhile."""
        for role, wait, _ in self.all:
            if wait.stopped_pid and role.state:
                yield _stopped(wait.on, wait.quiet_s + role.age_s, wait.stopped_pid)
            elif wait.owner == SUPERVISOR:
                cause: Cause = "crashing" if wait.detail else "starting"
                detail = f"{wait.event}: {wait.detail or 'the process is not ready yet'}"
                yield Finding(
                    blocker=wait.on,
                    cause=cause,
                    since_s=wait.waited_s + role.age_s,
                    detail=detail,
                )

    def reported(self) -> Iterator[Finding]:
        """Find paused servers and a datapipe that filters every group, as roles report them."""
        for role, wait, _ in self.all:
            cause = REPORTS.get(wait.owner)
            if cause is not None:
                yield Finding(
                    blocker=wait.on,
                    cause=cause,
                    since_s=wait.waited_s + role.age_s,
                    detail=wait.detail,
                )

    def absent(self) -> Iterator[Finding]:
        """Find ranks that exited before a collective in which other ranks wait."""
        for role, wait, targets in self.all:
            if wait.on == OTHER_RANKS and wait.waited_s > ABSENT_S:
                for name in sorted(targets - self.roles.keys()):
                    detail = f"the rank exited before a collective; {role.name} waits there"
                    detail += f" (see the log of {name})"
                    yield Finding(
                        blocker=name,
                        cause="dead",
                        since_s=wait.waited_s,
                        detail=detail,
                    )

    def overdue(self, overdue_s: float) -> Iterator[Finding]:
        """Find roles whose reply is overdue, and that wait for no other role."""
        for role, wait, _ in self.all:
            name = self._last_in_chain(wait.on)
            target = self.roles.get(name)
            # A process that was stopped or blocked needs time to read its messages and to reply.
            quiet_s = min(wait.quiet_s, role.vitals.awake_s)
            if target is not None:
                quiet_s = min(quiet_s, target.vitals.awake_s)
            quiet_s += role.age_s
            if not wait.replies_soon or quiet_s <= overdue_s:
                continue
            is_missing = target is None and ROLE.fullmatch(name)
            cause: Cause = "dead" if is_missing else "overdue"
            detail = "there is no such process; it" if target is None else "the process runs, but"
            detail += f" does not reply to {role.name}: {wait.event}"
            yield Finding(
                blocker=name,
                cause=cause,
                since_s=quiet_s,
                detail=detail,
            )

    def slow(self) -> Iterator[Finding]:
        """Find ranks whose computation takes longer than any before.

        Ranks that wait in a collective are left out, unless all late ranks do.
        """
        computing = [
            (role, wait)
            for role, wait, _ in self.all
            # A role with several waits is left out: another wait explains it.
            if wait.on == ITSELF and len(role.vitals.waits) == 1
        ]
        if not any(wait.waited_s > (wait.seconds or math.inf) for _, wait in computing):
            return
        outside_collectives = [
            (role, wait)
            for role, wait in computing
            if not role.vitals.counters.get("in_collective")
        ]
        for role, wait in outside_collectives or computing:
            detail = f"{wait.event} never took so long; `arealite why` shows its stack"
            yield Finding(
                blocker=role.name,
                cause="overdue",
                since_s=wait.waited_s + role.age_s,
                detail=detail,
            )

    def waiters(self, blocker: str) -> Iterator[str]:
        """Describe the waits for a role, directly or through other waiting roles."""
        blocked = {blocker}
        size = 0
        while len(blocked) > size:
            size = len(blocked)
            blocked |= {role.name for role, _, targets in self.all if targets & blocked}
        for role, wait, targets in self.all:
            is_report = wait.owner == SUPERVISOR or wait.owner in REPORTS
            if targets & blocked and role.name != blocker and not is_report:
                more = f" (and {wait.count - 1} more)" if wait.count > 1 else ""
                yield f"{role.name}: {wait.event}{more}, {wait.waited_s + role.age_s:.1f} s"

    def targets(self, role: RoleStatus, wait: Waits) -> set[str]:
        """Return the roles this wait depends on, including any named by its target."""
        if wait.on != OTHER_RANKS:
            return {wait.on, *ROLE.findall(wait.detail)} - {role.name, ITSELF}
        num_ranks = int(role.vitals.counters.get("ranks", 0))
        num_entered = role.vitals.counters.get("collectives", 0)
        targets: set[str] = set()
        for number in range(num_ranks):
            name = f"trainer-{number}"
            rank = self.roles.get(name)
            if rank is None or rank.vitals.counters.get("collectives", 0) < num_entered:
                targets.add(name)
        return targets

    def _last_in_chain(self, name: str) -> str:
        """Follow the waits from a role to a role that waits for no other role or is unhealthy."""
        seen: set[str] = set()
        while name not in seen:
            seen.add(name)
            for role, wait, targets in self.all:
                if role.name == name and wait.waited_s > ABSENT_S and targets - seen:
                    name = min(targets - seen)
                    break
        return name
