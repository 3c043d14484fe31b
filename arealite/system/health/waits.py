"""Names every wait that crosses a process: for what, on which role, since when and until when.

One table a process, because a hang is explained by the waits of all processes together: vitals
write the table to a file, and `arealite why` combines the tables of all roles.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
import types
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any, Self

from arealite.base.errors import DeadlineError

OTHER_RANKS = "the other ranks"
"""As `on`: those trainer ranks whose counter "collectives" is behind this one's."""
KEEPER = "keeper"
"""As `owner`: a parent process that is starting role `on`. `detail` is the reason of the last death
of that role; "" if there was none."""
PAUSER = "pauser"
"""As `owner`: a publisher that finds server `on` paused by another client. `detail` says more."""
ITSELF = "itself"
"""As `on`, of a computation: by experience, it takes no longer than `seconds`."""
END_S = 5.0
"""Seconds for the cleanup of a body that its deadline ended; see `Wait.run`."""


class Wait:
    """One wait that crosses a process, and the context manager that shows it: `with Wait(…):`.

    A wait with `seconds` that is entered by an asyncio task ends its body after that time with a
    DeadlineError. In a thread without an event loop, `seconds` is only shown.

    An asyncio.timeout for each wait costs more than the rest of a short episode, because it arms a
    timer that hardly ever fires. All waits of an event loop share one timer.

    Args:
        what: The event, as in "batch 12" or "the answer to /generate of g3/0".
        owner: The role that waits, as in "trainer rank 0".
        on: The role that has to act, by its name if it has one: "datapipe-0", "rollout-1",
            "trainer-1", "llm_server-127.0.0.1-8123", "environment math", OTHER_RANKS.
        seconds: The deadline; None: only the event ends the wait.
        prompt: Whether a live process answers, or at least reports what it waits for itself,
            within a second or two. Otherwise a long wait is nobody's fault.
        detail: What is known about the wait so far.
    """

    __slots__ = (
        "_base", "_task", "_timer", "detail", "expired", "heard", "left", "on", "owner", "prompt",
        "seconds", "since", "what", "when",
    )  # fmt: skip

    def __init__(
        self,
        what: str,
        *,
        owner: str,
        on: str = "",
        seconds: float | None = None,
        prompt: bool = False,
        detail: str = "",
    ) -> None:
        self.what, self.owner, self.on, self.seconds = what, owner, on, seconds
        self.prompt, self.detail = prompt, detail
        self.since = self.heard = time.monotonic()
        """When the wait began, and when the role in `on` last gave a sign of life."""
        self.expired = self.left = False
        self.when = math.inf
        """The deadline on the event loop's clock."""
        self._task: asyncio.Task[Any] | None = None
        self._timer: _Timer | None = None

    def hear(self, detail: str = "") -> None:
        """Note a sign of life of the role in `on`."""
        self.heard = time.monotonic()
        self.detail = detail or self.detail

    def __enter__(self) -> Self:
        table.add(self)
        try:
            self._task = task = asyncio.current_task()
        except RuntimeError:  # this thread runs no event loop
            return self
        if task is not None:
            self._base = task.cancelling()
            if self.seconds is not None:
                self._timer = timer = _timer_of(task.get_loop())
                self.when = timer.loop.time() + self.seconds
                timer.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        table.discard(self)
        if self._timer is not None:
            self._timer.waits.pop(self, None)
        if (task := self._task) is None:
            return
        if self.left:
            task.uncancel()
        # As in asyncio.timeout, another cancellation of the task meanwhile has precedence.
        if self.expired and task.uncancel() <= self._base and kind is asyncio.CancelledError:
            waited = time.monotonic() - self.since
            raise DeadlineError(self.what, owner=self.owner, seconds=waited)

    def expire(self) -> None:
        """End the body now, as at the deadline. Has no effect outside an asyncio task."""
        if self._task is not None and not self.expired:
            self.expired = True
            self._task.cancel()

    def leave(self) -> None:
        """End a body in `run` that swallows its cancellation."""
        if self._task is not None and self in table and not self.left:
            self.left = True
            self._task.cancel()

    @types.coroutine
    def run(self, work: Coroutine[Any, Any, None]) -> Generator[Any, Any, None]:
        """Await a coroutine in the body of this wait. `work` that has not ended END_S after the
        deadline is suspended for ever.
        """
        task = self._task
        assert task is not None
        step: Callable[[Any], Any] = work.send
        value: Any = None
        while True:
            try:
                awaited = step(value)
            except StopIteration:
                return
            if not self.expired:  # until Python 3.13 a TaskGroup that failed leaves it cancelled
                self._base = task.cancelling()
            try:
                step, value = work.send, (yield awaited)
            except BaseException as error:
                if self.left:
                    with suppress(Exception):  # it may swallow that, too
                        work.close()
                    raise
                step, value = work.throw, error
                if self.expired:
                    asyncio.get_running_loop().call_later(END_S, self.leave)


table: set[Wait] = set()
"""Of this process. A thread may read a copy (`list(table)`) at any time."""

counters: dict[str, float] = {}
"""Numbers of this process that vitals show besides."""


def is_cancelled() -> bool:
    """Return whether the current task itself is cancelled, and not only what it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class _Timer:
    """Ends the waits of one event loop at their deadlines."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.waits: dict[Wait, None] = {}
        """In the order in which they began: a simulation needs the same order in each run."""
        self._handle: asyncio.TimerHandle | None = None
        self._fires_at = math.inf

    def add(self, wait: Wait) -> None:
        """Expire a wait at `wait.when`, unless it ends before."""
        self.waits[wait] = None
        if wait.when < self._fires_at:
            if self._handle is not None:
                self._handle.cancel()
            self._fires_at = wait.when
            self._handle = self.loop.call_at(wait.when, self._fire)

    def _fire(self) -> None:
        now = self.loop.time()
        self._fires_at, self._handle = math.inf, None
        for wait in self.waits:
            if wait.when <= now:
                wait.expire()
        running = [wait for wait in self.waits if not wait.expired]
        if running:
            self.add(min(running, key=lambda wait: wait.when))


_threads = threading.local()


def _timer_of(loop: asyncio.AbstractEventLoop) -> _Timer:
    """Return the timer of the event loop that runs in this thread."""
    timer: _Timer | None = getattr(_threads, "timer", None)
    if timer is None or timer.loop is not loop:
        timer = _threads.timer = _Timer(loop)
    return timer
