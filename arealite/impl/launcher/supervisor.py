"""Supervisors: restart policy and restart budgets.

Launchers and the parents of servers are supervisors.
"""

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from arealite.api.findings import Finding
from arealite.api.launcher_hooks import HealthMonitorMaker
from arealite.base import entries
from arealite.base.errors import InvariantError, RoleError, UserError
from arealite.impl.launcher.processes import Child
from arealite.system.health import vitals, waits

ROLE = "AREALITE_ROLE"
"""Environment variable with the name that a server's parent has in the run."""
STOPPING = (UserError.exit_code, InvariantError.exit_code)
"""Exit codes after which a restart would fail in the same way or cause damage."""
EARLY_S = 5.0
"""Grace period after an unexpected clean exit."""
EXIT_REASON_S = 1.0
"""Time for other ranks to exit with a better reason, after one rank failed."""
PAUSES_S = (0.0, 0.25, 0.5, 1.0, 2.0)
"""Pauses before the restarts of a role that crashes repeatedly; later restarts use the last one."""
STEADY_S = 10.0
"""A role that ran for this long is restarted without a pause."""
EXAMINE_S = 1.0
"""Seconds between two looks at whether a started role is up."""


class RoleFailed(RoleError):
    """A role failed and is not restarted; the message gives the reason."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


@dataclass(kw_only=True)
class Budget:
    """Limit of a role's deaths without progress, and the pauses before its restarts."""

    limit: int
    role: str = ""
    """The role that `arealite why` shows as starting or crashing; "": `why` shows no starts."""
    pauses_s: Sequence[float] = field(default_factory=lambda: PAUSES_S)
    """Pause before each restart, in order; later restarts use the last one."""
    steady_s: float = STEADY_S
    """A role that ran for this long is restarted without a pause."""
    deaths: int = 0
    first: str = ""
    """Exit report of the first of these deaths."""
    _mark: float = 0.0
    _early: int = 0
    """Consecutive deaths within `steady_s` of the start."""
    wait: waits.Wait = field(
        default_factory=lambda: waits.Wait(event="start", owner=waits.SUPERVISOR)
    )
    """The published wait for the role to be up."""

    def mark_down(self, attempt: str, death_report: str = "") -> None:
        """Publish that the role is not up.

        Args:
            attempt: The present attempt, for example "restart 1 of 5".
            death_report: Exit report of the last death; "": there was none.
        """
        waits.table.discard(self.wait)
        self.wait = waits.Wait(
            event=attempt,
            owner=waits.SUPERVISOR,
            on=self.role,
            detail=death_report.partition("\n")[0],
        )
        if self.role:
            waits.table.add(self.wait)

    def mark_up(self, mark: float = math.inf) -> bool:
        """Publish that the role is up, and return True; after a second death, only if `mark` shows
        progress."""
        is_up = self.deaths < 2 or mark > self._mark
        if is_up:
            waits.table.discard(self.wait)
        return is_up

    def spend(self, report: str, *, mark: float, lived_s: float) -> float | None:
        """Count a death; return the seconds to pause before the next start, None: no more starts.

        The count restarts if `mark`, a measure of progress, has grown since the last death.
        """
        if mark > self._mark or not self.deaths:
            self.deaths = 0
            self.first = report
            self._mark = mark
            self._early = 0
        self.deaths += 1
        self.mark_down(f"restart {self.deaths} of {self.limit}", report)
        was_steady = lived_s > self.steady_s
        self._early = 0 if was_steady else self._early + 1
        if self.deaths > self.limit:
            self.mark_down(f"given up after {self.deaths} deaths", report)
            return None
        if was_steady:
            return 0.0
        pause_number = min(self._early, len(self.pauses_s))
        return self.pauses_s[pause_number - 1]


@dataclass(kw_only=True)
class Role:
    """Processes that are started and restarted together: one, or all ranks of the trainer."""

    names: tuple[str, ...]
    budget: Budget
    leads: bool = False
    """Whether the run ends with this role."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its processes may exit."""
    grace_s: float = field(default_factory=lambda: EARLY_S)
    """Longest time between the clean exit of a process and `over`; an earlier exit is a death."""
    children: list[Child] = field(default_factory=list[Child])
    """The processes started last."""
    ended: bool = False
    """Whether its work is done or no longer needed."""
    leaving: bool = False
    """Whether it was stopped before the end of the run."""

    def note_stopped(self) -> None:
        """Publish with the wait for the role to be up whether one of its processes is stopped."""
        wait = self.budget.wait
        wait.stopped_pid = 0
        for child in self.children:
            if vitals.is_stopped(child.pid):
                wait.stopped_pid = child.pid
                if len(self.children) > 1:
                    wait.on = child.name
                return
        wait.note_sign()

    async def end(self) -> Child | None:
        """Wait until one of its processes died, and return it; None: all ended as planned."""
        exits = {asyncio.ensure_future(child.process.wait()): child for child in self.children}
        exited: list[Child] = []
        try:
            while exits:
                is_early = bool(exited) and not self.over.is_set()
                done, _ = await asyncio.wait(
                    exits,
                    timeout=self.grace_s if is_early else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not done and not self.over.is_set():
                    return exited[0]
                if len(exits) > 1 and any(exits[task].code > 0 for task in done):
                    done, _ = await asyncio.wait(exits, timeout=EXIT_REASON_S)
                exited += [exits.pop(task) for task in done]
                failed = [child for child in exited if child.code]
                if failed:
                    return _child_with_reason(failed)
        finally:
            for task in exits:
                task.cancel()
        if not (self.leads or self.leaving):
            with suppress(TimeoutError):
                await asyncio.wait_for(self.over.wait(), self.grace_s)
        return None if self.leads or self.over.is_set() else exited[0]


def _child_with_reason(failed: Sequence[Child]) -> Child:
    """Return the child whose exit explains the others: one of STOPPING, else one by a signal."""
    return min(failed, key=lambda child: (child.code not in STOPPING, child.code))


class Supervisor(ABC):
    """Starts roles, and restarts them when they die, within their budgets."""

    option = "launcher.max_restarts"
    """The option that limits deaths without a `milestone` in between."""
    milestone = "a further trained step"

    def __init__(self, say: Callable[[str], object]) -> None:
        self.say = say
        """Prints a line for the user."""
        self.roles = list[Role]()

    @property
    def children(self) -> list[Child]:
        """The processes started last, of all roles."""
        return [child for role in self.roles for child in role.children]

    @abstractmethod
    async def start(self, role: Role) -> None:
        """Start all processes of a role, as its `children`."""

    @abstractmethod
    def is_needed(self, role: Role, dead: Child) -> bool:
        """Return whether to restart a role that died.

        Raises:
            ArealiteError: a restart would fail the same way.
        """

    @abstractmethod
    def mark(self) -> float:
        """Return a number that grows with each `milestone`."""

    def is_up(self, role: Role) -> bool:
        """Return whether a role has started its work; called in a thread."""
        return False

    async def end(self, role: Role) -> Child | None:
        """Wait until a process of a role died, and return it; None: all ended as planned."""
        marking = asyncio.ensure_future(self._mark_up(role))
        try:
            return await role.end()
        finally:
            marking.cancel()

    async def _mark_up(self, role: Role) -> None:
        """Publish that a role is up, once it is. Waits for: its files. Unblocks: no process."""
        while True:
            has_started = await asyncio.to_thread(self.is_up, role)
            if has_started and role.budget.mark_up(self.mark()):
                return
            role.note_stopped()
            await asyncio.sleep(EXAMINE_S)

    async def clear(self, role: Role) -> None:
        """Kill the processes of a role and their children, and wait until they have exited."""
        for child in role.children:
            child.kill()
        for child in role.children:
            await child.process.wait()

    async def pause(self, role: Role, dead: Child, seconds: float) -> None:
        """Wait before the restart of a role."""
        await asyncio.sleep(seconds)

    async def supervise(self, role: Role) -> None:
        """Start a role, and restart it when it dies, until it ends as planned or is stopped.

        Raises:
            RoleFailed: the restart budget is spent.
        """
        budget = role.budget
        restart_line = ""
        budget.mark_down("start")
        while not role.leaving:
            await self.start(role)
            if role.leaving:  # it was stopped before its process could receive a signal
                await self.clear(role)
                break
            if restart_line:
                self.say(restart_line)
            dead = await self.end(role)
            await self.clear(role)
            if dead is None or not self.is_needed(role, dead):
                break
            lived_s = time.monotonic() - dead.started
            pause_s = budget.spend(dead.exit_report, mark=self.mark(), lived_s=lived_s)
            budget.wait.detail = dead.exit_summary
            if pause_s is None:
                raise RoleFailed(self._budget_report(budget, dead), max(dead.code, 1))
            await self.pause(role, dead, pause_s)
            if not self.is_needed(role, dead):
                break
            attempt = f"{budget.deaths} of {budget.limit}"
            restart_line = f"{dead.exit_summary}; started again ({attempt})"
        budget.mark_up()

    def _budget_report(self, budget: Budget, dead: Child) -> str:
        """Return the error for a spent restart budget."""
        if not budget.limit:
            return budget.first
        return (
            f"{dead.exit_summary}, {budget.deaths} times without {self.milestone}; "
            f"{self.option}={budget.limit}. The first: {budget.first}"
        )

    def child_of(self, finding: Finding) -> Child | None:
        """Return the running child that a finding is about; None: it is about another process."""
        for child in self.children:
            if child.running and child.pid == finding.pid:
                return child
        return None

    def is_shown(self, finding: Finding) -> bool:
        """Return whether the health monitor reports a finding."""
        return False

    @contextmanager
    def monitored(
        self, vitals: Path, *, silent_s: float = 8.0, blocked_s: float = 60.0
    ) -> Generator[None]:
        """Run the health monitors of extensions during the body.

        Args:
            vitals: Where the roles write their vitals.
            silent_s: Seconds after which a silent or stopped child is killed.
            blocked_s: Seconds after which a blocked child is killed.
        """
        makers: list[HealthMonitorMaker] = entries.hooks("health_monitor")
        monitors: list[asyncio.Future[None]] = []
        for make in makers:
            watching = make(vitals, self, silent_s=silent_s, blocked_s=blocked_s)
            monitors.append(asyncio.ensure_future(watching))
        try:
            yield
        finally:
            for monitor in monitors:
                monitor.cancel()
