"""Records every wait that crosses a process: its event, its role, its begin and its deadline.

Each process has one table of waits. Vitals write the table to a file, and `arealite why` combines
the tables of all roles to explain a hang.
"""

import asyncio
import math
import threading
import time
import types
from collections.abc import Callable, Collection, Coroutine, Generator
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Self

from arealite.base.errors import DeadlineError

OTHER_RANKS = "the other ranks"
"""Value of `on`: the trainer ranks whose counter "collectives" is less than the waiter's."""
SUPERVISOR = "supervisor"
"""Value of `owner`: a parent process that is starting role `on`. `detail` is the reason of the
role's last crash; "" if there was none."""
PAUSE_OBSERVER = "pause observer"
"""Value of `owner`: a publisher that found server `on` paused by another client. `detail` is a
sentence about it."""
GROUP_FILTER = "group filter"
"""Value of `owner`: the datapipe, `on`, filters every group. `detail` is a sentence about it."""
ITSELF = "itself"
"""Value of `on`: the wait is a computation that never took longer than `seconds` before."""
END_S = 5.0
"""Seconds for the cleanup of a body after its deadline; see `Wait.run`."""


@dataclass(slots=True, eq=False, kw_only=True)
class Wait:
    """One wait that crosses a process, and the context manager that shows it: `with Wait(…):`.

    A wait with `seconds` that is entered by an asyncio task ends its body after that time with a
    DeadlineError. In a thread without an event loop, `seconds` is only shown.

    An asyncio.timeout for each wait costs more than the rest of a short episode, because it arms a
    timer that hardly ever fires. All waits of an event loop share one timer.

    Args:
        event: What is waited for, as in "batch 12" or "the answer to /generate of g3/0".
        owner: The role that waits, as in "trainer rank 0".
        on: The role that has to act, by its name if it has one: "datapipe-0", "rollout-1",
            "trainer-1", "llm_server-127.0.0.1-8123", "environment math", OTHER_RANKS.
        seconds: The deadline; None: only the event ends the wait.
        replies_soon: Whether a healthy process replies, or reports its own waits, within a second
            or two. Otherwise a long wait is no evidence of a fault.
        detail: The newest report about the wait.
        stopped_pid: Process id of the role in `on`, if the waiting parent sees that it is stopped.
    """

    event: str
    _: KW_ONLY
    owner: str
    on: str = ""
    seconds: float | None = None
    replies_soon: bool = False
    detail: str = ""
    stopped_pid: int = 0
    since: float = field(init=False)
    last_sign: float = field(init=False)
    """Begin of the wait, and time of the last sign of life of the role in `on`."""
    expired: bool = field(default=False, init=False)
    abandoned: bool = field(default=False, init=False)
    deadline: float = field(default=math.inf, init=False)
    """The deadline on the event loop's clock."""
    _task: asyncio.Task[object] | None = field(default=None, init=False)
    _timer: "_Timer | None" = field(default=None, init=False)
    _base: int = field(default=0, init=False)
    """Number of the task's cancellations that are not by this wait."""

    def __post_init__(self) -> None:
        self.since = self.last_sign = time.monotonic()

    def note_sign(self, detail: str = "") -> None:
        """Record a sign of life of the role in `on`."""
        self.last_sign = time.monotonic()
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
                self._timer = _timer_of(task.get_loop())
                self._arm()
        return self

    def _arm(self) -> None:
        if self._timer is not None and self.seconds is not None:
            self.deadline = self._timer.loop.time() + self.seconds
            self._timer.add(self)

    @staticmethod
    @contextmanager
    def without_deadline() -> Generator[None]:
        """Pause the deadlines of the current task's waits; they begin anew after the body."""
        task = asyncio.current_task()
        waits = [wait for wait in table if wait._task is task]
        for wait in waits:
            wait.deadline = math.inf
        try:
            yield
        finally:
            for wait in waits:
                wait._arm()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        table.discard(self)
        if self._timer is not None:
            self._timer.waits.pop(self, None)
        if (task := self._task) is None:
            return
        if self.abandoned:
            task.uncancel()
        if not self.expired:
            return
        # As in asyncio.timeout, another cancellation of the task meanwhile has precedence.
        is_cancelled_elsewhere = task.uncancel() > self._base
        if kind is asyncio.CancelledError and not is_cancelled_elsewhere:
            waited_s = time.monotonic() - self.since
            raise DeadlineError(self.event, owner=self.owner, seconds=waited_s)

    def expire(self) -> None:
        """End the body now, as at the deadline. Has no effect outside an asyncio task."""
        if self._task is not None and not self.expired:
            self.expired = True
            self._task.cancel()

    def abandon(self) -> None:
        """End a body in `run` that swallows its cancellation."""
        if self._task is not None and self in table and not self.abandoned:
            self.abandoned = True
            self._task.cancel()

    @types.coroutine
    def run(self, work: Coroutine[object, object, None]) -> Generator[object, object, None]:
        """Await a coroutine in the body of this wait.

        This is `await work`, except that a coroutine that swallows its cancellation is abandoned.
        An `await` cannot stop a coroutine that goes on, so this method resumes `work` itself: each
        resumption returns the future that `work` awaits next, and the event loop gets this future.

        Args:
            work: The coroutine. If it has not ended END_S after the deadline, it is never resumed.
        """
        resume: Callable[[], Any] = partial(work.send, None)
        while True:
            try:
                awaited_future = resume()
            except StopIteration:  # `work` has returned
                return
            self._note_cancellations()
            try:
                wakeup = yield awaited_future
            except BaseException as error:
                if self.abandoned:
                    with suppress(Exception):  # `work` may swallow GeneratorExit, too
                        work.close()
                    raise
                if self.expired:
                    asyncio.get_running_loop().call_later(END_S, self.abandon)
                resume = partial(work.throw, error)
            else:
                resume = partial(work.send, wakeup)

    def _note_cancellations(self) -> None:
        """Count the task's cancellations so far as not of this wait, if it has not expired.

        Until Python 3.13, a TaskGroup that failed leaves its task cancelled.
        """
        assert self._task is not None
        if not self.expired:
            self._base = self._task.cancelling()


table: set[Wait] = set()
"""The waits of this process. A thread may read a copy (`list(table)`) at any time."""

counters: dict[str, float] = {}
"""Further numbers of this process that are written with its vitals."""


def is_cancelled() -> bool:
    """Return whether the current task itself is cancelled, and not only what it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def cancel_all(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until they end, whatever they raise."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _Timer:
    """Ends the waits of one event loop at their deadlines."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.waits: dict[Wait, None] = {}
        """In the order of their begin, because a simulation needs the same order in each run."""
        self._handle: asyncio.TimerHandle | None = None
        self._fires_at = math.inf

    def add(self, wait: Wait) -> None:
        """Expire a wait at `wait.deadline`, unless it ends before."""
        self.waits[wait] = None
        if wait.deadline < self._fires_at:
            if self._handle is not None:
                self._handle.cancel()
            self._fires_at = wait.deadline
            self._handle = self.loop.call_at(wait.deadline, self._fire)

    def _fire(self) -> None:
        now = self.loop.time()
        self._fires_at = math.inf
        self._handle = None
        for wait in self.waits:
            if wait.deadline <= now:
                wait.expire()
        running = [wait for wait in self.waits if not wait.expired]
        if running:
            self.add(min(running, key=lambda wait: wait.deadline))


_threads = threading.local()


def _timer_of(loop: asyncio.AbstractEventLoop) -> _Timer:
    """Return the timer of the event loop that runs in this thread."""
    timer: _Timer | None = getattr(_threads, "timer", None)
    if timer is None or timer.loop is not loop:
        timer = _threads.timer = _Timer(loop)
    return timer
