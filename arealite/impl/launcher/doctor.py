"""Looks once a second who holds a run up, says so, and kills a child that has stopped living.

Only kills: what dies is brought back by whoever keeps it.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from arealite.base import log
from arealite.impl.launcher.processes import Child
from arealite.system.health.diagnosis import Finding, examine

EXAMINE_S = 1.0
QUIET_S = 10.0
"""A finding that was away for this long is new."""
FRAME = re.compile(r'File "(.*)", line (\d+), in (.*)')

Trouble = tuple[str, str, int]
"""Who, what, and its process: the same trouble of a successor is another."""

logger = log.get(__name__)


@dataclass
class Doctor:
    """Examines the vitals in `folder`."""

    folder: Path
    child: Callable[[Finding], Child | None]
    """Returns the child that a finding is about; other processes are never killed."""
    say: Callable[[str], None]
    silent_s: float = 8.0
    blocked_s: float = 60.0
    """How long a child may be silent or stopped, and blocked."""
    is_shown: Callable[[Finding], bool] = lambda finding: True
    _seen: dict[Trouble, float] = field(default_factory=dict["Trouble", float])
    """When each was there last."""

    async def run(self) -> None:
        """Examine until cancelled. Waits for: the clock. Unblocks: everyone who waits for a role
        that does nothing."""
        before = set[Trouble]()
        while True:
            await asyncio.sleep(EXAMINE_S)
            try:
                findings = await asyncio.to_thread(examine, self.folder)
            except Exception as error:  # noqa: BLE001  (who looks must not end what it looks at)
                logger.warning("no diagnosis", error=repr(error))
                continue
            for finding in findings:
                self._tell(finding)
                if trouble(finding) in before:  # else we may all have been held
                    self._heal(finding)
            before = {trouble(finding) for finding in findings}

    def _tell(self, finding: Finding) -> None:
        key, now = trouble(finding), time.monotonic()
        if now - self._seen.get(key, -math.inf) > QUIET_S and self.is_shown(finding):
            self.say(describe(finding))
        self._seen[key] = now

    def _heal(self, finding: Finding) -> None:
        # Who is dead and still somebody's child was run by it, and its end was not told.
        limits: dict[str, float] = dict.fromkeys(("stopped", "silent", "dead"), self.silent_s)
        limits["blocked"] = self.blocked_s
        is_due = finding.since_s >= limits.get(finding.cause, math.inf)
        if is_due and (child := self.child(finding)):
            self.say(f"{finding.culprit} is killed after {finding.since_s:.0f} s")
            child.kill()


def trouble(finding: Finding) -> Trouble:
    """Tell a finding from others, and from the same of another process."""
    return finding.culprit, finding.cause, finding.pid


def describe(finding: Finding) -> str:
    """Say in one line who holds the run up, with what, where and whom."""
    text = f"{finding.culprit} is {finding.cause}: {finding.detail}"
    if frames := list(FRAME.finditer(finding.stack)):
        file, line, function = frames[-1].groups()
        text += f" (at {file}:{line} in {function})"
    if finding.victims:
        first, *others = finding.victims
        text += f"; waiting: {first}" + (f" and {len(others)} more" if others else "")
    return text
