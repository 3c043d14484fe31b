"""Restart policy, restart budgets and the health monitor, for launchers and the server's parent."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from arealite.base import log
from arealite.base.errors import InvariantError, RoleError, UserError
from arealite.impl.launcher.processes import Child
from arealite.system.health import waits
from arealite.system.health.diagnosis import Finding, examine

ROLE = "AREALITE_ROLE"
"""Environment variable with the name that a server's parent has in the run."""
STOPPING = (UserError.exit_code, InvariantError.exit_code)
"""Exit codes after which a second attempt would fail the same way, or do harm."""
EARLY_S = 5.0
"""Grace period after an unexpected clean exit."""
LAST_WORDS_S = 1.0
"""When one rank fails, the others may be about to end with a better reason."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 2.0
STEADY_S = 10.0
"""A role that lived this long is started again without a pause."""
EXAMINE_S = 1.0
"""How often the vitals of all roles are examined."""
QUIET_S = 10.0
"""A finding is reported again after an absence of this long."""
FRAME = re.compile(r'File "(.*)", line (\d+), in (.*)')

Trouble = tuple[str, str, int]
"""A role, a cause and a process id: a successor's trouble is another one."""

logger = log.get(__name__)


class Died(RoleError):
    """A role is not started again; the message is for a person."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


@dataclass
class Budget:
    """How often a role may die without getting anywhere, and how long it pauses after a death."""

    limit: int
    role: str = ""
    """The role that `arealite why` shows as starting or crashing; "": `why` shows no starts."""
    deaths: int = 0
    first: str = ""
    """What was said of the first of these deaths."""
    _mark: float = 0.0
    _hasty: int = 0
    """Deaths in a row that came soon after the start."""
    wait: waits.Wait = field(default_factory=lambda: waits.Wait("start", owner=waits.KEEPER))
    """The published wait for the role to be up."""

    def expect(self, what: str, why: str = "") -> None:
        """Publish that the role is not up: `what` is happening, and `why` it died last."""
        waits.table.discard(self.wait)
        detail = why.partition("\n")[0]
        self.wait = waits.Wait(what, owner=waits.KEEPER, on=self.role, detail=detail)
        if self.role:
            waits.table.add(self.wait)

    def forget(self, mark: float = math.inf) -> None:
        """Publish that the role is up; after a second death, only if `mark` shows progress."""
        if self.deaths < 2 or mark > self._mark:
            waits.table.discard(self.wait)

    def spend(self, said: str, *, mark: float, lived_s: float) -> float | None:
        """Count a death; return the seconds to pause before the next start, None: no more starts.

        `mark` tells how far the work has come: where it has grown since the last death, the count
        begins anew.
        """
        if mark > self._mark or not self.deaths:
            self.deaths, self.first, self._mark, self._hasty = 0, said, mark, 0
        self.deaths += 1
        self.expect(f"restart {self.deaths} of {self.limit}", said)
        self._hasty = 0 if lived_s > STEADY_S else self._hasty + 1
        if self.deaths > self.limit:
            self.expect(f"given up after {self.deaths} deaths", said)
            return None
        return min(FIRST_PAUSE_S * 2 ** (self._hasty - 2), LONGEST_PAUSE_S) * (self._hasty > 1)


@dataclass
class Role:
    """Processes that live and die together: one, or all ranks of the trainer."""

    names: tuple[str, ...]
    budget: Budget
    leads: bool = False
    """Its end is the end of the run."""
    children: list[Child] = field(default_factory=list[Child])
    """As they were started last."""
    ended: bool = False
    """Its work is done, or nobody needs it any longer."""
    leaving: bool = False
    """It was asked to end before the run does."""

    async def end(self, over: asyncio.Event) -> Child | None:
        """Wait until one of its processes died, and return that; None: all ended as planned.

        Who leaves before the run is `over`, while others stay, has died.
        """
        exits = {asyncio.ensure_future(c.process.wait()): c for c in self.children}
        left: list[Child] = []
        try:
            while exits:
                limit = EARLY_S if left and not over.is_set() else None
                done, _ = await asyncio.wait(
                    exits, timeout=limit, return_when=asyncio.FIRST_COMPLETED
                )
                if not done and not over.is_set():
                    return left[0]
                if len(exits) > 1 and any(exits[task].code > 0 for task in done):
                    done, _ = await asyncio.wait(exits, timeout=LAST_WORDS_S)
                left += [exits.pop(task) for task in done]
                if dead := [child for child in left if child.code]:
                    return min(dead, key=lambda child: (child.code not in STOPPING, child.code))
        finally:
            for task in exits:
                task.cancel()
        if not (self.leads or self.leaving):
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), EARLY_S)
        return None if self.leads or over.is_set() else left[0]

    async def clear(self) -> None:
        """Kill what is left of its processes, their own children included, and see them gone."""
        for child in self.children:
            child.kill()
        for child in self.children:
            await child.process.wait()


@dataclass
class HealthMonitor:
    """Finds, reports and kills unresponsive children, once a second.

    It only kills: the supervisor of a child starts it again.
    """

    folder: Path
    """Where the roles write their vitals."""
    child: Callable[[Finding], Child | None]
    """Returns the child that a finding is about; other processes are never killed."""
    say: Callable[[str], None]
    silent_s: float = 8.0
    blocked_s: float = 60.0
    """How long a child may be silent or stopped (`silent_s`), and blocked."""
    is_shown: Callable[[Finding], bool] = lambda finding: True
    _seen: dict[Trouble, float] = field(default_factory=dict["Trouble", float])
    """When each trouble was last found."""

    async def run(self) -> None:
        """Examine until cancelled. Waits for: the clock. Unblocks: roles that wait for an
        unresponsive one."""
        before = set[Trouble]()
        while True:
            await asyncio.sleep(EXAMINE_S)
            try:
                findings = await asyncio.to_thread(examine, self.folder)
            except Exception as error:  # noqa: BLE001  (an examination must not end the run)
                logger.warning("no diagnosis", error=repr(error))
                continue
            for finding in findings:
                self._tell(finding)
                if trouble(finding) in before:  # else this process may have been stopped, too
                    self._heal(finding)
            before = {trouble(finding) for finding in findings}

    def _tell(self, finding: Finding) -> None:
        key, now = trouble(finding), time.monotonic()
        if now - self._seen.get(key, -math.inf) > QUIET_S and self.is_shown(finding):
            self.say(describe(finding))
        self._seen[key] = now

    def _heal(self, finding: Finding) -> None:
        # A dead role whose child still runs was run by that child, as srun does.
        limits: dict[str, float] = dict.fromkeys(("stopped", "silent", "dead"), self.silent_s)
        limits["blocked"] = self.blocked_s
        is_due = finding.since_s >= limits.get(finding.cause, math.inf)
        if is_due and (child := self.child(finding)):
            self.say(f"{finding.culprit} is killed after {finding.since_s:.0f} s")
            child.kill()


def trouble(finding: Finding) -> Trouble:
    """Return what distinguishes a finding from others."""
    return finding.culprit, finding.cause, finding.pid


def describe(finding: Finding) -> str:
    """Return one line: the blocking role, the cause, the place, and the roles that wait."""
    text = f"{finding.culprit} is {finding.cause}: {finding.detail}"
    if frames := list(FRAME.finditer(finding.stack)):
        file, line, function = frames[-1].groups()
        text += f" (at {file}:{line} in {function})"
    if finding.victims:
        first, *others = finding.victims
        text += f"; waiting: {first}" + (f" and {len(others)} more" if others else "")
    return text
