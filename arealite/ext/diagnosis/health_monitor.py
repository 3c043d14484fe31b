"""The health monitor of a supervisor: finds, reports and kills unresponsive children."""

import asyncio
import math
import re
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arealite.api.findings import Cause, Finding
from arealite.api.launcher_hooks import WatchedSupervisor
from arealite.base import log
from arealite.ext.diagnosis.diagnosis import examine

EXAMINE_S = 1.0
"""Seconds between two examinations of the vitals of all roles."""
QUIET_S = 10.0
"""A finding is reported again after an absence of this long."""
REMIND_S = 300.0
"""A lasting finding of cause "filtering" is reported again after this long."""
FRAME = re.compile(r'File "(.*)", line (\d+), in (.*)')

FindingKey = tuple[str, str, int]
"""(role, cause, process id); the next process of a role has another id."""

logger = log.get(__name__)


@dataclass(kw_only=True)
class HealthMonitor:
    """Finds, reports and kills unresponsive children, once a second.

    The monitor only kills; the supervisor of a child restarts it.
    """

    folder: Path
    """Where the roles write their vitals."""
    supervisor: WatchedSupervisor
    """Parent of the children; other processes are never killed."""
    silent_s: float
    blocked_s: float
    """Seconds after which a silent or stopped child (`silent_s`), or a blocked one, is killed."""
    _seen: dict[FindingKey, float] = field(default_factory=dict["FindingKey", float])
    """Monotonic time at which each finding was last made."""
    _reported: dict[FindingKey, float] = field(default_factory=dict["FindingKey", float])
    """Monotonic time at which each finding was last reported."""

    async def run(self) -> None:
        """Examine until cancelled. Waits for: the clock. Unblocks: roles that wait for an
        unresponsive role."""
        before = set[FindingKey]()
        while True:
            await asyncio.sleep(EXAMINE_S)
            try:
                findings = await asyncio.to_thread(examine, self.folder)
            except Exception as error:  # noqa: BLE001  (an examination must not end the run)
                logger.warning("no diagnosis", error=repr(error))
                continue
            for finding in findings:
                self._report(finding)
                if finding_key(finding) in before:  # else this process may have been stopped, too
                    self._kill_if_due(finding)
            before = {finding_key(finding) for finding in findings}

    def _report(self, finding: Finding) -> None:
        key = finding_key(finding)
        now = time.monotonic()
        is_new = now - self._seen.get(key, -math.inf) > QUIET_S
        reported_at = self._reported.get(key, -math.inf)
        is_reminder = finding.cause == "filtering" and now - reported_at > REMIND_S
        if (is_new or is_reminder) and self.supervisor.is_shown(finding):
            self.supervisor.say(describe(finding))
            self._reported[key] = now
        self._seen[key] = now

    def _kill_if_due(self, finding: Finding) -> None:
        limits_s: dict[Cause, float] = {
            "stopped": self.silent_s,
            "silent": self.silent_s,
            # The child may be srun, which still runs although the role's process is dead.
            "dead": self.silent_s,
            "blocked": self.blocked_s,
        }
        if finding.since_s < limits_s.get(finding.cause, math.inf):
            return
        child = self.supervisor.child_of(finding)
        if child is not None:
            self.supervisor.say(f"{finding.blocker} is killed after {finding.since_s:.0f} s")
            child.kill()


def monitor_children(
    folder: Path, supervisor: WatchedSupervisor, *, silent_s: float, blocked_s: float
) -> Coroutine[Any, Any, None]:
    """Return what watches the children of a supervisor until it is cancelled."""
    monitor = HealthMonitor(
        folder=folder,
        supervisor=supervisor,
        silent_s=silent_s,
        blocked_s=blocked_s,
    )
    return monitor.run()


def finding_key(finding: Finding) -> FindingKey:
    """Return the key under which repeated findings are the same."""
    return finding.blocker, finding.cause, finding.pid


def describe(finding: Finding) -> str:
    """Return one line: the blocking role, the cause, the place, and the roles that wait."""
    description = f"{finding.blocker} is {finding.cause}: {finding.detail}"
    frames = list(FRAME.finditer(finding.stack))
    if frames:
        file, line, function = frames[-1].groups()
        description += f" (at {file}:{line} in {function})"
    if finding.waiters:
        first, *others = finding.waiters
        description += f"; waiting: {first}"
        if others:
            description += f" and {len(others)} more"
    return description
