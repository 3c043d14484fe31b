"""Finds the roles that block a run, from the vitals of all roles.

The functions have no side effects. The launcher, which kills blocked processes, and `arealite why`
use them, so both report the same findings.
"""

import math
import os
import re
import socket
import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal, get_args

import msgspec

from arealite.base.errors import UserError
from arealite.base.folder_checks import check_folder
from arealite.system.clocks import folder_time
from arealite.system.health.vitals import (
    BEAT_S,
    Vitals,
    Waits,
    cpu_times,
    process_state,
)
from arealite.system.health.waits import (
    GROUP_FILTER,
    ITSELF,
    OTHER_RANKS,
    PAUSE_OBSERVER,
    SUPERVISOR,
)

Cause = Literal[
    "stopped", "dead", "crashing", "silent", "blocked", "starved", "paused", "filtering", "overdue",
    "starting",
]  # fmt: skip
"""stopped: SIGSTOP or a debugger stopped the process. dead: the process has exited. crashing: the
process crashed, and its parent restarts it. silent: the process exists, but writes no vitals.
blocked: the event loop runs no task. starved: silent or blocked, because the process gets no CPU.
paused: a client that is not this trial's publisher paused the server. filtering: the datapipe
filters every group, so that no step can be trained. overdue: the process runs,
but its reply to another role is late. starting: the parent has started the process, which has not
written vitals yet."""
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
FORGET_DEAD_S = 60.0
"""A role that died this long ago is reported only if another role waits for it."""
ABSENT_S = 2.0
"""After a wait of this long, a role without vitals is regarded as absent."""
ROLE = re.compile(r"\b(?:datapipe|rollout|trainer)-\d+\b")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One role that blocks other roles or is unhealthy."""

    blocker: str
    """The role, as in "rollout-1"."""
    cause: Cause
    since_s: float
    detail: str
    """One line that describes the state of the role."""
    stack: str = ""
    """The blocking stack, if it is known."""
    waiters: tuple[str, ...] = ()
    """The waits for the role, as in "trainer-0: batch 12, 8.2 s"."""
    pid: int = 0
    """Process id of the role; 0: the process is on another host."""


@dataclass(frozen=True, kw_only=True)
class RoleStatus:
    """State of one process, from its vitals and from the kernel."""

    vitals: Vitals
    age_s: float
    """Seconds since the last heartbeat."""
    state: str
    """The kernel's state letter of the process; "X" if it is gone, "" if it is on another host."""

    @property
    def name(self) -> str:
        return self.vitals.name

    @property
    def is_alive(self) -> bool:
        """Whether the process exists; on another host, whether its heartbeat is recent."""
        return self.state not in "XZ" if self.state else self.age_s < FORGET_DEAD_S

    def finding(self, *, silent_s: float, blocked_s: float) -> Finding | None:
        """Return the finding about this role alone; None if the role is healthy."""
        pid = self.vitals.pid
        if self.state in ("T", "t"):
            return _stopped(self.name, self.age_s, pid)
        if self.state in ("X", "Z"):
            return Finding(
                blocker=self.name,
                cause="dead",
                since_s=self.age_s,
                detail=f"pid {pid} crashed or was killed",
            )
        is_silent = self.age_s > silent_s
        loop_blocked_s = self.vitals.blocked_s + self.age_s if self.vitals.blocked_s else 0.0
        if not is_silent and loop_blocked_s <= blocked_s:
            return None
        late_s = self.age_s if is_silent else loop_blocked_s
        cpu_wait_share = self.cpu_wait_share(late_s)
        if cpu_wait_share and late_s * (1.0 - cpu_wait_share) <= MAX_BUSY_S:
            return self._starved(late_s, cpu_wait_share)
        if is_silent:
            return self._silent(is_cpu_wait_unknown=cpu_wait_share is None)
        return Finding(
            blocker=self.name,
            cause="blocked",
            since_s=loop_blocked_s,
            detail=f"the event loop of pid {pid} runs no task, because a call does not return",
            stack=self.vitals.blocked_stack,
        )

    def _starved(self, late_s: float, cpu_wait_share: float) -> Finding:
        pid = self.vitals.pid
        load = f"load {os.getloadavg()[0]:.0f}, {os.cpu_count()} CPUs: run fewer processes"
        detail = f"pid {pid} waited for a CPU for {cpu_wait_share:.0%} of {late_s:.1f} s ({load})"
        return Finding(
            blocker=self.name,
            cause="starved",
            since_s=late_s,
            detail=detail,
            stack=self.vitals.blocked_stack,
        )

    def _silent(self, *, is_cpu_wait_unknown: bool) -> Finding:
        detail = f"pid {self.vitals.pid} on {self.vitals.host} exists, but writes no vitals: "
        detail += "C code or the kernel blocks its interpreter"
        if is_cpu_wait_unknown:
            detail += ", or it gets no CPU"
        detail += f" (state {self.state or 'unknown'})"
        return Finding(
            blocker=self.name,
            cause="silent",
            since_s=self.age_s,
            detail=detail,
        )

    def cpu_wait_share(self, late_s: float) -> float | None:
        """Return the share of `late_s` in which the process waited for a CPU, from 0 to 1.

        The main thread, which may hold the GIL, and the thread that writes the vitals are examined;
        the larger share counts. The kernel does not count a wait that has not ended. Therefore, a
        runnable thread with at most FEW_TIMESLICES since its vitals were written counts as waiting.

        Returns:
            None if the kernel has no scheduler statistics of the process.
        """
        share = 0.0
        pid = self.vitals.pid
        for thread, before in self.vitals.cpu.items():
            now = cpu_times(pid, thread) if self.state else None
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


def read_roles(folder: Path) -> list[RoleStatus]:
    """Read the vitals in `folder`, and the kernel's state of each process of this host."""
    roles: list[RoleStatus] = []
    now = folder_time(folder)
    for path in sorted(folder.glob("[!.]*.json")):
        try:
            vitals = msgspec.json.decode(path.read_bytes(), type=Vitals)
            age_s = now - path.stat().st_mtime
        except (OSError, msgspec.DecodeError):
            continue  # removed in the meantime
        state = ""
        if vitals.host == socket.gethostname():
            age_s = min(age_s, time.monotonic() - vitals.clock)
            state = _kernel_state(vitals)
        roles.append(RoleStatus(vitals=vitals, age_s=max(0.0, age_s), state=state))
    return roles


def _kernel_state(vitals: Vitals) -> str:
    """Return the state letter of a process of this host; "X" if it is gone, "" if unknown."""
    if not vitals.started:
        return ""
    process = process_state(vitals.pid)
    if process is None:
        return "X"
    state, started = process
    return state if started == vitals.started else "X"


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
        finding = role.finding(silent_s=limit_s, blocked_s=blocked_s)
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
