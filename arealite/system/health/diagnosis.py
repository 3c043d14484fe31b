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
from arealite.base.places import check_folder
from arealite.system.clocks import folder_time
from arealite.system.health.vitals import BEAT_S, Vitals, Waits, cpu_times, process_state
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


@dataclass(frozen=True)
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


@dataclass(frozen=True)
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

    def finding(self, *, silent_s: float, blocked_s: float) -> Finding | None:
        """Return the finding about this role alone; None if the role is healthy."""
        vitals = self.vitals
        age_s = self.age_s
        pid = self.vitals.pid
        blocked = vitals.blocked_s + age_s if vitals.blocked_s else 0.0
        if self.state and self.state in "Tt":
            what = f"SIGSTOP or a debugger stopped pid {pid}; kill -CONT {pid} continues it"
            return Finding(self.name, "stopped", age_s, what)
        if self.state and self.state in "XZ":
            return Finding(self.name, "dead", age_s, f"pid {pid} crashed or was killed")
        late_s, limit_s = (age_s, silent_s) if age_s > silent_s else (blocked, blocked_s)
        if late_s <= limit_s:
            return None
        share = self.cpu_wait_share(late_s)
        if share and late_s * (1.0 - share) <= MAX_BUSY_S:
            load = f"load {os.getloadavg()[0]:.0f}, {os.cpu_count()} CPUs: run fewer processes"
            what = f"pid {pid} waited for a CPU for {share:.0%} of {late_s:.1f} s ({load})"
            return Finding(self.name, "starved", late_s, what, vitals.blocked_stack)
        if age_s > silent_s:
            what = f"pid {pid} on {vitals.host} exists, but writes no vitals: C code or the kernel "
            what += "blocks its interpreter" + (", or it gets no CPU" if share is None else "")
            what += f" (state {self.state or 'unknown'})"
            return Finding(self.name, "silent", age_s, what)
        what = f"the event loop of pid {pid} runs no task, because a call does not return"
        return Finding(self.name, "blocked", blocked, what, vitals.blocked_stack)

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
            if not (self.state and before and (now := cpu_times(pid, thread))):
                return None
            passed_s, ran_s, waited_s, slices = (a - b for a, b in zip(now, before, strict=True))
            is_main = thread == pid
            rest_s = 0.0 if is_main else BEAT_S
            if is_main:
                share = max(share, waited_s / min(late_s, passed_s))
            if slices <= FEW_TIMESLICES and (process_state(pid, thread) or "?")[0] == "R":
                share = max(share, (passed_s - rest_s - ran_s) / (late_s - rest_s))
        return min(1.0, share)


def read_roles(folder: Path) -> list[RoleStatus]:
    """Read the vitals in `folder`, and the kernel's state of each process of this host."""
    found: list[RoleStatus] = []
    now = folder_time(folder)
    for path in sorted(folder.glob("[!.]*.json")):
        try:
            vitals = msgspec.json.decode(path.read_bytes(), type=Vitals)
            written = path.stat().st_mtime
        except (OSError, msgspec.DecodeError):
            continue  # removed in the meantime
        ages = [now - written]
        state = ""
        if vitals.host == socket.gethostname():
            ages.append(time.monotonic() - vitals.clock)
            if vitals.started:
                state, started = process_state(vitals.pid) or ("X", vitals.started)
                state = state if started == vitals.started else "X"
        found.append(RoleStatus(vitals, max(0.0, min(ages)), state))
    return found


def examine(
    folder: Path,
    *,
    silent_s: float = SILENT_S,
    blocked_s: float = BLOCKED_S,
    overdue_s: float = OVERDUE_S,
    known: Sequence[RoleStatus] | None = None,
) -> list[Finding]:
    """Return the roles that block the run, the worst cause first.

    Args:
        folder: Folder of the vitals.
        silent_s: Age of a heartbeat after which a role is silent.
        blocked_s: Seconds without a callback after which an event loop is blocked.
        overdue_s: Seconds without a sign of life after which a reply is overdue.
        known: The roles, if they were read already; None: read `folder`.
    """
    roles = {role.name: role for role in (read_roles(folder) if known is None else known)}
    found: dict[str, Finding] = {}
    for role in roles.values():
        limit_s = silent_s if role.state else max(silent_s, REMOTE_SILENT_S)
        if (finding := role.finding(silent_s=limit_s, blocked_s=blocked_s)) is not None:
            found[role.name] = replace(finding, pid=role.vitals.pid if role.state else 0)
    silent = [name for name, finding in found.items() if finding.cause == "silent"]
    try:
        if silent:
            check_folder(folder, "the folder of vitals", "cluster.name_root")
    except UserError as error:  # then a silent role may be healthy
        found = {name: each for name, each in found.items() if name not in silent}
        found[str(folder)] = Finding(str(folder), "overdue", 0.0, f"no role can write: {error}")
    graph = WaitGraph(roles, unhealthy=found)
    crashing = {each.blocker: each for each in graph.restarted()}
    found |= {n: each for n, each in crashing.items() if n not in found or found[n].cause == "dead"}
    for late in chain(graph.reported(), graph.absent(), graph.overdue(overdue_s), graph.slow()):
        found.setdefault(late.blocker, late)
    whole = [replace(each, waiters=tuple(graph.waiters(name))) for name, each in found.items()]
    kept = [f for f in whole if f.cause != "dead" or f.waiters or f.since_s < FORGET_DEAD_S]
    return sorted(kept, key=lambda f: (ORDER.index(f.cause), -len(f.waiters), -f.since_s))


class WaitGraph:
    """The waits of all roles, except those of unhealthy roles."""

    def __init__(self, roles: dict[str, RoleStatus], *, unhealthy: Container[str] = ()) -> None:
        self.roles = roles
        self.unhealthy = unhealthy
        self.all = [
            (role, wait, self.targets(role, wait))
            for role in roles.values()
            if role.name not in unhealthy
            for wait in sorted(role.vitals.waits, key=lambda wait: -wait.waited_s)
        ]

    def restarted(self) -> Iterator[Finding]:
        """Find roles whose parent is starting or restarting them."""
        for role, wait, _ in self.all:
            if wait.owner == SUPERVISOR:
                cause: Cause = "crashing" if wait.detail else "starting"
                what = f"{wait.what}: {wait.detail or 'the process is not ready yet'}"
                yield Finding(wait.on, cause, wait.waited_s + role.age_s, what)

    def reported(self) -> Iterator[Finding]:
        """Find paused servers and a datapipe that filters every group, as roles report them."""
        for role, wait, _ in self.all:
            if (cause := REPORTS.get(wait.owner)) is not None:
                yield Finding(wait.on, cause, wait.waited_s + role.age_s, wait.detail)

    def absent(self) -> Iterator[Finding]:
        """Find ranks that exited before a collective in which other ranks wait."""
        for role, wait, targets in self.all:
            if wait.on == OTHER_RANKS and wait.waited_s > ABSENT_S:
                for name in sorted(targets - self.roles.keys()):
                    what = f"the rank exited before a collective; {role.name} waits there"
                    what += f" (see the log of {name})"
                    yield Finding(name, "dead", wait.waited_s, what)

    def overdue(self, overdue_s: float) -> Iterator[Finding]:
        """Find roles whose reply is overdue, and that wait for no other role."""
        for role, wait, _ in self.all:
            name = self._last_in_chain(wait.on)
            # A process that was stopped or blocked needs time to read its messages and to reply.
            awake = [each.vitals.awake_s for each in (role, self.roles.get(name)) if each]
            quiet_s = min(wait.quiet_s, *awake) + role.age_s
            if not wait.replies_soon or quiet_s <= overdue_s:
                continue
            lives = name in self.roles
            cause: Cause = "overdue" if lives or not ROLE.fullmatch(name) else "dead"
            what = "the process runs, but" if lives else "there is no such process; it"
            what += f" does not reply to {role.name}: {wait.what}"
            yield Finding(name, cause, quiet_s, what)

    def slow(self) -> Iterator[Finding]:
        """Find ranks whose computation takes longer than any before.

        Ranks that wait in a collective are left out, unless all late ranks do.
        """
        found = [(role, wait) for role, wait, _ in self.all if wait.on == ITSELF]
        # A role with several waits is left out: another wait explains it.
        busy = [each for each in found if len(each[0].vitals.waits) == 1]
        if any(wait.waited_s > (wait.seconds or math.inf) for _, wait in busy):
            alone = [each for each in busy if not each[0].vitals.counters.get("in_collective")]
            for role, wait in alone or busy:
                what = f"{wait.what} never took so long; `arealite why` shows its stack"
                yield Finding(role.name, "overdue", wait.waited_s + role.age_s, what)

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
                yield f"{role.name}: {wait.what}{more}, {wait.waited_s + role.age_s:.1f} s"

    def targets(self, role: RoleStatus, wait: Waits) -> set[str]:
        """Return the roles this wait depends on, including any named by its target."""
        if wait.on != OTHER_RANKS:
            return {wait.on, *ROLE.findall(wait.detail)} - {role.name, ITSELF}
        mine = role.vitals.counters
        return {
            name
            for name in [f"trainer-{rank}" for rank in range(int(mine.get("ranks", 0)))]
            if (rank := self.roles.get(name)) is None
            or rank.vitals.counters.get("collectives", 0) < mine.get("collectives", 0)
        }

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
