"""Knows who in this process waits for whom, since when and until when.

One table a process, because a hang is explained by the sum of what all processes wait for; vitals
show it outside, and `arealite why` puts the tables of all roles together.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

OTHER_RANKS = "the other ranks"
"""As `on`: those trainer ranks whose counter "collectives" is behind this one's."""
KEEPER = "keeper"
"""As `owner`: a parent process that is starting role `on`. `detail` is the reason of the last death
of that role; "" if there was none."""
PAUSER = "pauser"
"""As `owner`: a publisher that finds server `on` paused by another client. `detail` says more."""
ITSELF = "itself"
"""As `on`, of a computation: by experience, it takes no longer than `seconds`."""


@dataclass(slots=True, eq=False)
class Wait:
    """One wait that crosses a process."""

    what: str
    """For which event, as in "batch 12" or "the answer to /generate of g3/0"."""
    owner: str
    """Who waits, as in "trainer rank 0"."""
    on: str
    """Who has to act, by the name of its role where it has one: "datapipe-0", "rollout-1",
    "trainer-1", "llm_server-127.0.0.1-8123", "environment math", OTHER_RANKS."""
    seconds: float | None = None
    """When it ends by itself; None: only by the event."""
    prompt: bool = False
    """Whether a live process answers, or at least says who else is waited for, within a second or
    two; else it may take as long as it takes, and nobody is to blame."""
    since: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    """When whom it waits for last gave a sign, or it began."""
    detail: str = ""
    """What is known meanwhile, by the last word of whom is waited for."""

    def hear(self, detail: str = "") -> None:
        """Note a sign of whom is waited for."""
        self.heard = time.monotonic()
        self.detail = detail or self.detail


table: set[Wait] = set()
"""Of this process. A thread may read a copy (`list(table)`) at any time."""

counters: dict[str, float] = {}
"""Numbers of this process that vitals show besides."""


@contextmanager
def waiting(
    what: str, *, owner: str, on: str, seconds: float | None = None, prompt: bool = False
) -> Generator[Wait, None, None]:
    """Show a wait for the time of the body; it bounds nothing itself (`deadlines` does)."""
    wait = Wait(what, owner, on, seconds, prompt)
    table.add(wait)
    try:
        yield wait
    finally:
        table.discard(wait)
