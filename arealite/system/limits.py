"""Time limits of hundreds of waits at once, all on one timer of the event loop.

asyncio.timeout arms a timer for each wait; that costs more than all else that an episode does, and
hardly one of them ever rings. Vitals read them as they stand: a table of them would cost as much.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Self, cast
from weakref import WeakSet


class Limit:
    """Ends its body with a TimeoutError at `when` (the loop's time), or once `expire` is called.

    Made and used as a context manager by the task that waits; `what`, `owner` and `on` are as in
    `waits.Wait`. Without a name it is shown nowhere.
    """

    __slots__ = ("_limits", "_task", "expired", "on", "owner", "since", "what", "when")

    def __init__(
        self, limits: Limits, when: float, *, what: str = "", owner: str = "", on: str = ""
    ) -> None:
        self.when = when
        self.what = what
        self.owner = owner
        self.on = on
        self.since = time.monotonic()
        self.expired = False
        self._limits = limits
        self._task = cast("asyncio.Task[object]", asyncio.current_task())

    def __enter__(self) -> Self:
        self._limits.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._limits.held.discard(self)
        # As in asyncio.timeout, whoever else cancelled the task meanwhile has precedence.
        if self.expired and not self._task.uncancel() and kind is asyncio.CancelledError:
            raise TimeoutError

    def expire(self) -> None:
        """End the body now."""
        if not self.expired:
            self.expired = True
            self._task.cancel()


class Limits:
    """The limits in force in one event loop."""

    def __init__(self) -> None:
        self.held: set[Limit] = set()
        everywhere.add(self)
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = math.inf

    def add(self, limit: Limit) -> None:
        """Put a limit in force."""
        self.held.add(limit)
        if limit.when < self._rings_at:
            if self._timer is not None:
                self._timer.cancel()
            self._rings_at = limit.when
            self._timer = asyncio.get_running_loop().call_at(limit.when, self._ring)

    def _ring(self) -> None:
        now = asyncio.get_running_loop().time()
        self._rings_at, self._timer = math.inf, None
        for limit in self.held:
            if limit.when <= now:
                limit.expire()
        running = [limit for limit in self.held if not limit.expired]
        if running:
            self.add(min(running, key=lambda limit: limit.when))


everywhere: WeakSet[Limits] = WeakSet()
"""All of this process."""
