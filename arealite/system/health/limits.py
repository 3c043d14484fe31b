"""Time limits of hundreds of waits at once, all on one timer of the event loop.

asyncio.timeout arms a timer for each wait; that costs more than all else that an episode does, and
hardly one of them ever rings. Vitals read them as they stand: a table of them would cost as much.
"""

from __future__ import annotations

import asyncio
import math
import time
import types
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any, Self, cast
from weakref import WeakSet

END_S = 5.0
"""What a limit ends has this long for what it cleans up; then it is left."""


class Limit:
    """Ends its body with a TimeoutError at `when` (the loop's time), or once `expire` is called.

    Made and used as a context manager by the task that waits; `what`, `owner` and `on` are as in
    `waits.Wait`. Without a name it is shown nowhere.
    """

    __slots__ = (
        *("_base", "_limits", "_task", "expired", "left"),
        *("on", "owner", "since", "what", "when"),
    )

    def __init__(
        self, limits: Limits, when: float, *, what: str = "", owner: str = "", on: str = ""
    ) -> None:
        self.when = when
        self.what = what
        self.owner = owner
        self.on = on
        self.since = time.monotonic()
        self.expired = self.left = False
        self._limits = limits
        self._task = cast("asyncio.Task[object]", asyncio.current_task())

    def __enter__(self) -> Self:
        self._limits.add(self)
        self._base = self._task.cancelling()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._limits.held.discard(self)
        if self.left:
            self._task.uncancel()
        # As in asyncio.timeout, whoever else cancelled the task meanwhile has precedence.
        if self.expired and self._task.uncancel() <= self._base and kind is asyncio.CancelledError:
            raise TimeoutError

    def expire(self) -> None:
        """End the body now."""
        if not self.expired:
            self.expired = True
            self._task.cancel()

    def leave(self) -> None:
        """End a body that is `held`, and swallows that it is cancelled."""
        if self in self._limits.held and not self.left:
            self.left = True
            self._task.cancel()

    @types.coroutine
    def hold(self, held: Coroutine[Any, Any, None]) -> Generator[Any, Any, None]:
        """Await a coroutine in the body; one that goes on for END_S after the limit is left where
        it stands, and never goes on.
        """
        step: Callable[[Any], Any] = held.send
        value: Any = None
        while True:
            try:
                wait = step(value)
            except StopIteration:
                return
            if not self.expired:  # until Python 3.13 a TaskGroup that failed leaves it cancelled
                self._base = self._task.cancelling()
            try:
                step, value = held.send, (yield wait)
            except BaseException as error:
                if self.left:
                    with suppress(Exception):  # it may swallow that, too
                        held.close()
                    raise
                step, value = held.throw, error
                if self.expired:
                    asyncio.get_running_loop().call_later(END_S, self.leave)


def is_cancelled() -> bool:
    """Say whether the current task is cancelled itself, and not only something it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


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
