"""Puts the vitals of all roles together and names who holds the run up.

Pure of effects, because the launcher, which heals, and `arealite why`, which tells, must agree.
"""

from __future__ import annotations

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
from arealite.system.health.vitals import BEAT_S, Vitals, Waits, process, spent
from arealite.system.health.waits import ITSELF, KEEPER, OTHER_RANKS, PAUSER

Cause = Literal[
    "stopped", "dead", "crashing", "silent", "blocked", "starved", "paused", "overdue", "starting"
]
"""stopped: the kernel holds the process (SIGSTOP, a debugger). dead: the process is gone. crashing:
the process died and its parent restarts it. silent: the process runs, but shows no sign of life.
blocked: the event loop runs nothing. starved: the process would be neither if it got a CPU.
paused: a client that is not this trial's publisher paused the server. overdue: the process lives,
but others wait for it beyond their deadline. starting: the parent started the process, which has
shown no vitals yet."""
ORDER: tuple[Cause, ...] = get_args(Cause)

SILENT_S, REMOTE_SILENT_S, BLOCKED_S, OVERDUE_S = 4.0, 15.0, 3.0, 5.0
OWN_S = 1.0
"""Who is late by more than this beside what it waited for a CPU is not starved."""
FEW_TURNS = 20
"""Who asks for the interpreter in vain gets a CPU 200 times a second, and who has one beats: after
this few turns, it is the CPU that is lacking."""
FORGOTTEN_S = 60.0
"""Who is dead for this long and missed by nobody is no finding."""
ABSENT_S = 2.0
"""After a wait of this long, a role that shows no vitals is not about to."""
ROLE = re.compile(r"\b(?:datapipe|rollout|trainer)-\d+\b")


@dataclass(frozen=True)
class Finding:
    """One role that holds others up."""

    blocker: str
    """The role that holds up others, as in "rollout-1"."""
    cause: Cause
    since_s: float
    detail: str
    """One line: what it does or does not do."""
    stack: str = ""
    """Of what blocks it, where known."""
    waiters: tuple[str, ...] = ()
    """Waits for it: "trainer-0: batch 12, 8.2 s"."""
    pid: int = 0
    """Of the process that was found so; 0: not one of this host."""


@dataclass(frozen=True)
class Role:
    """What is known of one process, from its vitals and from the kernel."""

    vitals: Vitals
    age_s: float
    """Since its last sign of life."""
    state: str
    """The kernel's letter for its process; "" for another host's, "X" where it is gone."""

    @property
    def name(self) -> str:
        return self.vitals.name

    def finding(self, *, silent_s: float, blocked_s: float) -> Finding | None:
        """Say what is wrong with the role by itself."""
        vitals, age_s, pid = self.vitals, self.age_s, self.vitals.pid
        blocked = vitals.blocked_s + age_s if vitals.blocked_s else 0.0
        if self.state and self.state in "Tt":
            what = f"the kernel holds pid {pid} (SIGSTOP or a debugger); kill -CONT {pid} frees it"
            return Finding(self.name, "stopped", age_s, what)
        if self.state and self.state in "XZ":
            return Finding(self.name, "dead", age_s, f"pid {pid} is gone, and it did not say why")
        late_s, limit_s = (age_s, silent_s) if age_s > silent_s else (blocked, blocked_s)
        if late_s <= limit_s:
            return None
        share = self.cpu_wait(late_s)
        if share and late_s * (1.0 - share) <= OWN_S:
            load = f"load {os.getloadavg()[0]:.0f}, {os.cpu_count()} CPUs: run fewer processes"
            what = f"pid {pid} waited for a CPU in {share:.0%} of {late_s:.1f} s ({load})"
            return Finding(self.name, "starved", late_s, what, vitals.blocked_stack)
        if age_s > silent_s:
            what = f"pid {pid} on {vitals.host} exists, but its interpreter runs no thread: it is "
            what += "held by C code or the kernel" + (", or gets no CPU" if share is None else "")
            what += f" (state {self.state or 'unknown'})"
            return Finding(self.name, "silent", age_s, what)
        what = f"the event loop of pid {pid} has run nothing; a call does not come back"
        return Finding(self.name, "blocked", blocked, what, vitals.blocked_stack)

    def cpu_wait(self, late_s: float) -> float | None:
        """Return the share of its lateness in which it waited for a CPU; None: not known.

        Either its main thread did, which may have the interpreter, or the one that shows its vitals
        does. A wait that goes on is in no book, but who can run and hardly ever did has waited.
        """
        share, pid = 0.0, self.vitals.pid
        for thread, before in self.vitals.cpu.items():
            if not (self.state and before and (now := spent(pid, thread))):
                return None
            passed_s, ran_s, waited_s, turns = (a - b for a, b in zip(now, before, strict=True))
            is_main = thread == pid
            rest_s = 0.0 if is_main else BEAT_S
            if is_main:
                share = max(share, waited_s / min(late_s, passed_s))
            if turns <= FEW_TURNS and (process(pid, thread) or "?")[0] == "R":
                share = max(share, (passed_s - rest_s - ran_s) / (late_s - rest_s))
        return min(1.0, share)


def read(folder: Path) -> list[Role]:
    """Read the vitals in `folder`, and what the kernel says of this host's processes."""
    found: list[Role] = []
    now = folder_time(folder)
    for path in sorted(folder.glob("[!.]*.json")):
        try:
            vitals = msgspec.json.decode(path.read_bytes(), type=Vitals)
            written = path.stat().st_mtime
        except (OSError, msgspec.DecodeError):
            continue  # removed while we looked
        ages, state = [now - written], ""
        if vitals.host == socket.gethostname():
            ages.append(time.monotonic() - vitals.clock)
            if vitals.started:
                state, started = process(vitals.pid) or ("X", vitals.started)
                state = state if started == vitals.started else "X"
        found.append(Role(vitals, max(0.0, min(ages)), state))
    return found


def examine(
    folder: Path,
    *,
    silent_s: float = SILENT_S,
    blocked_s: float = BLOCKED_S,
    overdue_s: float = OVERDUE_S,
    known: Sequence[Role] | None = None,
) -> list[Finding]:
    """Read the vitals in `folder`, unless they are `known`, and return who holds the run up, worst
    first."""
    roles = {role.name: role for role in (read(folder) if known is None else known)}
    found: dict[str, Finding] = {}
    for role in roles.values():
        limit_s = silent_s if role.state else max(silent_s, REMOTE_SILENT_S)
        if (finding := role.finding(silent_s=limit_s, blocked_s=blocked_s)) is not None:
            found[role.name] = replace(finding, pid=role.vitals.pid if role.state else 0)
    silent = [name for name, finding in found.items() if finding.cause == "silent"]
    try:
        if silent:
            check_folder(folder, "the folder of vitals", "cluster.name_root")
    except UserError as error:  # then silence tells nothing
        found = {name: each for name, each in found.items() if name not in silent}
        found[str(folder)] = Finding(str(folder), "overdue", 0.0, f"no role can write: {error}")
    graph = WaitGraph(roles, troubled=found)
    crashing = {each.blocker: each for each in graph.restarted()}
    found |= {n: each for n, each in crashing.items() if n not in found or found[n].cause == "dead"}
    late_ones = graph.paused(), graph.absent(), graph.overdue(overdue_s), graph.slow()
    for late in chain(*late_ones):
        found.setdefault(late.blocker, late)
    whole = [replace(each, waiters=tuple(graph.waiters(name))) for name, each in found.items()]
    kept = [f for f in whole if f.cause != "dead" or f.waiters or f.since_s < FORGOTTEN_S]
    return sorted(kept, key=lambda f: (ORDER.index(f.cause), -len(f.waiters), -f.since_s))


class WaitGraph:
    """The waits of all roles; a role that is in trouble by itself waits for no other."""

    def __init__(self, roles: dict[str, Role], *, troubled: Container[str] = ()) -> None:
        self.roles, self.troubled = roles, troubled
        self.all = [
            (role, wait, self.targets(role, wait))
            for role in roles.values()
            if role.name not in troubled
            for wait in sorted(role.vitals.waits, key=lambda wait: -wait.waited_s)
        ]

    def restarted(self) -> Iterator[Finding]:
        """Find roles whose parent is starting or restarting them."""
        for role, wait, _ in self.all:
            if wait.owner == KEEPER:
                cause: Cause = "crashing" if wait.detail else "starting"
                what = f"{wait.what}: {wait.detail or 'it is not up yet'}"
                yield Finding(wait.on, cause, wait.waited_s + role.age_s, what)

    def paused(self) -> Iterator[Finding]:
        """Find servers that a publisher found paused by another client."""
        for role, wait, _ in self.all:
            if wait.owner == PAUSER:
                yield Finding(wait.on, "paused", wait.waited_s + role.age_s, wait.detail)

    def absent(self) -> Iterator[Finding]:
        """Find ranks that others meet in a collective, and that are no more."""
        for role, wait, targets in self.all:
            if wait.on == OTHER_RANKS and wait.waited_s > ABSENT_S:
                for name in sorted(targets - self.roles.keys()):
                    what = f"it ended before a collective in which {role.name} waits; see its log"
                    yield Finding(name, "dead", wait.waited_s, what)

    def overdue(self, overdue_s: float) -> Iterator[Finding]:
        """Find who lets others wait though a live process answers, and waits for nobody itself."""
        for role, wait, _ in self.all:
            name = self._end(wait.on)
            # Who was stopped or blocked until now has not heard, or answered, what is there.
            awake = [each.vitals.awake_s for each in (role, self.roles.get(name)) if each]
            quiet_s = min(wait.quiet_s, *awake) + role.age_s
            if not wait.prompt or quiet_s <= overdue_s:
                continue
            lives = name in self.roles
            cause: Cause = "overdue" if lives or not ROLE.fullmatch(name) else "dead"
            begin = "it lives, but gives" if lives else "it shows no vitals, and gives"
            yield Finding(name, cause, quiet_s, f"{begin} {role.name} no answer: {wait.what}")

    def slow(self) -> Iterator[Finding]:
        """Find who computes for longer than any of the ranks ever did: not those who only meet
        it."""
        busy = [
            (role, wait)
            for role, wait, _ in self.all
            if wait.on == ITSELF and len(role.vitals.waits) == 1  # else that is bounded or overdue
        ]
        if any(wait.waited_s > (wait.seconds or math.inf) for _, wait in busy):
            alone = [each for each in busy if not each[0].vitals.counters.get("in_collective")]
            for role, wait in alone or busy:
                what = f"{wait.what} never took so long; the stacks of `arealite why` say where"
                yield Finding(role.name, "overdue", wait.waited_s + role.age_s, what)

    def waiters(self, blocker: str) -> Iterator[str]:
        """Describe the waits for a role, and those for its waiters."""
        held, size = {blocker}, 0
        while len(held) > size:  # waiters have waiters, too
            size = len(held)
            held |= {role.name for role, _, targets in self.all if targets & held}
        for role, wait, targets in self.all:
            if targets & held and role.name != blocker and wait.owner not in (KEEPER, PAUSER):
                more = f" (and {wait.count - 1} more)" if wait.count > 1 else ""
                yield f"{role.name}: {wait.what}{more}, {wait.waited_s + role.age_s:.1f} s"

    def targets(self, role: Role, wait: Waits) -> set[str]:
        """Return the roles this wait depends on, including any named by its target."""
        if wait.on != OTHER_RANKS:
            return {wait.on, *ROLE.findall(wait.detail)} - {role.name, ITSELF}
        mine = role.vitals.counters
        ranks = [f"trainer-{rank}" for rank in range(int(mine.get("ranks", 0)))]
        return {
            name
            for name in ranks
            if (rank := self.roles.get(name)) is None
            or rank.vitals.counters.get("collectives", 0) < mine.get("collectives", 0)
        }

    def _end(self, name: str) -> str:
        """Follow the chain of waits from a role to who waits for nobody, or is in trouble."""
        seen: set[str] = set()
        while name not in seen:
            seen.add(name)
            for role, wait, targets in self.all:
                if role.name == name and wait.waited_s > ABSENT_S and targets - seen:
                    name = min(targets - seen)
                    break
        return name
