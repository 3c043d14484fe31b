"""Who is to live, and how often one may die: the rules by which a role is brought back.

Apart from the launcher, which knows what a run is: a server's parent goes by the same budget.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from dataclasses import dataclass, field

from arealite.base.errors import InvariantError, RoleError, UserError
from arealite.impl.launcher.processes import Child
from arealite.system.health import waits

ROLE = "AREALITE_ROLE"
"""Environment variable with the name that a server's parent has in the run."""
STOPPING = (UserError.exit_code, InvariantError.exit_code)
"""Exit codes after which a second attempt would fail the same way, or do harm."""
EARLY_S = 5.0
"""Who has left as if the run were over has this long to be right."""
LAST_WORDS_S = 1.0
"""When one rank fails, the others may be about to end with a better reason."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 2.0
STEADY_S = 10.0
"""Who lived this long is started again without a pause."""


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
    wait: waits.Wait = field(default_factory=lambda: waits.Wait("start", waits.KEEPER, ""))
    """The published wait for the role to be up."""

    def expect(self, what: str, why: str = "") -> None:
        """Publish that the role is not up: `what` is happening, and `why` it died last."""
        waits.table.discard(self.wait)
        self.wait = waits.Wait(what, waits.KEEPER, self.role, detail=why.partition("\n")[0])
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
