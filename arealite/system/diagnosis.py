"""Puts the vitals of all roles together and names who holds the run up.

Pure of effects, because the launcher, which heals, and `arealite why`, which tells, must agree.
"""

from __future__ import annotations

import math
import re
import socket
import tempfile
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from arealite.system.clocks import folder_time
from arealite.system.vitals import Vitals, Waits, process
from arealite.system.waits import ITSELF, OTHER_RANKS

Cause = Literal["stopped", "dead", "silent", "blocked", "overdue"]
"""stopped: the kernel holds the process (SIGSTOP, a debugger). dead: its process is gone. silent:
it runs, but shows no sign of life. blocked: its event loop runs nothing. overdue: it lives, but
others wait for it beyond their deadline."""
ORDER: tuple[Cause, ...] = ("stopped", "dead", "silent", "blocked", "overdue")

SILENT_S, REMOTE_SILENT_S, BLOCKED_S, OVERDUE_S = 4.0, 15.0, 3.0, 5.0
FORGOTTEN_S = 60.0
"""Who is dead for this long and missed by nobody is no finding."""
ABSENT_S = 2.0
"""After a wait of this long, a role that shows no vitals is not about to."""
ROLE = re.compile(r"\b(?:datapipe|rollout|trainer)-\d+\b")


@dataclass(frozen=True)
class Finding:
    """One role that holds others up."""

    culprit: str
    """Its role, as in "rollout-1"."""
    cause: Cause
    since_s: float
    detail: str
    """One line: what it does or does not do."""
    stack: str = ""
    """Of what blocks it, where known."""
    victims: tuple[str, ...] = ()
    """Who waits for it: "trainer-0: batch 12, 8.2 s"."""
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
        if age_s > silent_s:
            what = f"pid {pid} on {vitals.host} exists, but its interpreter runs no thread: it is "
            what += f"held by C code or the kernel (state {self.state or 'unknown'})"
            return Finding(self.name, "silent", age_s, what)
        if blocked > blocked_s:
            what = f"the event loop of pid {pid} has run nothing; a call does not come back"
            return Finding(self.name, "blocked", blocked, what, vitals.blocked_stack)
        return None


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
) -> list[Finding]:
    """Read the vitals in `folder` and return who holds the run up, worst first."""
    roles = {role.name: role for role in read(folder)}
    found: dict[str, Finding] = {}
    for role in roles.values():
        limit_s = silent_s if role.state else max(silent_s, REMOTE_SILENT_S)
        if (finding := role.finding(silent_s=limit_s, blocked_s=blocked_s)) is not None:
            found[role.name] = replace(finding, pid=role.vitals.pid if role.state else 0)
    silent = [name for name, finding in found.items() if finding.cause == "silent"]
    if silent and (why := _unwritable(folder)):  # then silence tells nothing
        found = {name: each for name, each in found.items() if name not in silent}
        found[str(folder)] = Finding(str(folder), "overdue", 0.0, f"no role can write there: {why}")
    waitings = Waitings(roles, troubled=found)
    for late in [*waitings.absent(), *waitings.overdue(overdue_s), *waitings.slow()]:
        found.setdefault(late.culprit, late)
    whole = [replace(each, victims=tuple(waitings.victims(name))) for name, each in found.items()]
    kept = [f for f in whole if f.cause != "dead" or f.victims or f.since_s < FORGOTTEN_S]
    return sorted(kept, key=lambda f: (ORDER.index(f.cause), -len(f.victims), -f.since_s))


class Waitings:
    """Who waits for whom, over all roles; those in trouble by themselves are nobody's victims."""

    def __init__(self, roles: dict[str, Role], *, troubled: Container[str] = ()) -> None:
        self.roles, self.troubled = roles, troubled
        self.all = [
            (role, wait, self.targets(role, wait))
            for role in roles.values()
            if role.name not in troubled
            for wait in sorted(role.vitals.waits, key=lambda wait: -wait.waited_s)
        ]

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

    def victims(self, culprit: str) -> Iterator[str]:
        """Say who waits for a role, or for somebody who does."""
        held, size = {culprit}, 0
        while len(held) > size:  # also those who wait for who waits
            size = len(held)
            held |= {role.name for role, _, targets in self.all if targets & held}
        for role, wait, targets in self.all:
            if targets & held and role.name != culprit:
                more = f" (and {wait.count - 1} more)" if wait.count > 1 else ""
                yield f"{role.name}: {wait.what}{more}, {wait.waited_s + role.age_s:.1f} s"

    def targets(self, role: Role, wait: Waits) -> set[str]:
        """Name whom a wait is for; who is named by the last word of whom it is for counts, too."""
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


def _unwritable(folder: Path) -> str:
    """Say why nothing can be written to a folder; "" where it can."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        return str(error.strerror)
    return ""
