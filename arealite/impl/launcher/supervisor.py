"""Processes that are to live, and how often one may die: what brings a role back.

Apart from the launcher, which knows what a run is: the command of a server keeps its process by
the same rules.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from arealite.base.errors import InvariantError, RoleError, UserError

PARENT = "AREALITE_PARENT"
"""Environment variable by which a process knows who brings it back: a process id."""
PR_SET_PDEATHSIG = 1
TAIL_LINES = 15
STOPPING = (UserError.exit_code, InvariantError.exit_code)
"""Exit codes after which a second attempt would fail the same way, or do harm."""
EARLY_S = 5.0
"""A process that has left as if the run were over has this long to be right."""
LAST_WORDS_S = 1.0
"""When one rank fails, the others may be about to end with a better reason."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 10.0
STEADY_S = 10.0
"""A process that lived this long is started again without a pause."""


class Died(RoleError):
    """A role is not started again; the message is for a person."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


@dataclass
class Child:
    """One process of a role."""

    name: str
    process: asyncio.subprocess.Process
    log: Path
    log_begin: int = 0
    """Where in its log this process began to write."""
    started: float = field(default_factory=time.monotonic)

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    @property
    def code(self) -> int:
        """Its exit code; of a signal's death, the signal's number below zero."""
        return self.process.returncode or 0

    def kill(self) -> None:
        """Kill it and what it has started, at once; it leads a session of its own."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def how(self) -> str:
        """Say how it ended, with its own last word where it had one."""
        said = self._lines()[-1:]
        why = f": {said[0].removeprefix('error: ')}" if said and said[0][:7] == "error: " else ""
        return how_ended(self.code) + (why if self.code > 0 else "")

    def tail(self) -> str:
        """Return the last lines that this process wrote, or only the last where that says it
        all."""
        lines = self._lines()[-TAIL_LINES:]
        if lines and lines[-1].startswith("error: "):
            lines = lines[-1:]
        return "\n".join(f"    {line}" for line in lines or ["(empty: is the disk full?)"])

    def _lines(self) -> list[str]:
        with self.log.open("rb") as file:
            file.seek(self.log_begin)
            return file.read().decode(errors="replace").splitlines()


@dataclass
class Budget:
    """How often a role may die without getting anywhere, and how long it pauses after a death."""

    limit: int
    deaths: int = 0
    first: str = ""
    """What was said of the first of these deaths."""
    _mark: float = 0.0
    _hasty: int = 0
    """Deaths in a row that came soon after the start."""

    def spend(self, said: str, *, mark: float, lived_s: float) -> float | None:
        """Count a death; return the seconds to pause before the next start, None: no more starts.

        `mark` tells how far the work has come: what it has grown by since the last death begins
        the count anew.
        """
        if mark > self._mark or not self.deaths:
            self.deaths, self.first, self._mark = 0, said, mark
        self.deaths += 1
        self._hasty = 0 if lived_s > STEADY_S else self._hasty + 1
        if self.deaths > self.limit:
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
        if not self.leads:
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), EARLY_S)
        return None if self.leads or over.is_set() else left[0]

    async def clear(self) -> None:
        """Kill what is left of its processes, their own children included, and see them gone."""
        for child in self.children:
            child.kill()
        for child in self.children:
            await child.process.wait()


def how_ended(code: int) -> str:
    """Say how a process ended, from the code that its parent got."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}" if code else "left too early"


def die_with_parent() -> bool:
    """Ask the kernel to kill this process when the one that brings it back dies, so that no orphan
    is left; False: nobody does.

    Raises:
        UserError: it is dead already.
    """
    parent = os.environ.pop(PARENT, None)
    if parent is None:
        return False
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        raise UserError("the launcher died before this role started.")
    return True
