"""An event loop in virtual time for many simulated processes; a seed determines the order.

The time is constant while a handle can run, and jumps to the next timer otherwise. A handle belongs
to the process in whose context it was created. Handles of one process run in order; the order
between processes is random. A stopped or dead process keeps its handles but runs none.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from tests.waiting import settle

STEP_S = 2e-6
"""Virtual seconds for one handle."""
MAX_HANDLES = 3_000_000
"""Maximum number of handles of a seed; more means an endless loop."""


current: contextvars.ContextVar[Process] = contextvars.ContextVar("process")


class Process:
    """One simulated process and its queue of handles."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[asyncio.Handle] = deque()
        self.runs = True
        """False while the process is stopped, and after it died."""
        self.dead = False
        self.in_runnable = False
        self.context = contextvars.Context()
        """Context in which messages are delivered."""
        self.context.run(current.set, self)
        self.on_term: Callable[[], Any] | None = None
        """Its handler of SIGTERM."""

    def __repr__(self) -> str:
        return self.name


ROOT = Process("root")


class Killed(BaseException):
    """Ends the running handle of a killed process."""


class Stuck(Exception):
    """No handle can run and no timer is due: a deadlock."""


class SimTask(asyncio.Task):  # type: ignore[type-arg]
    """A task with a hash that does not depend on addresses, so that sets have one order."""

    def __init__(self, coro: Any, *, number: int, **kwargs: Any) -> None:
        self.number = number
        super().__init__(coro, **kwargs)

    def __hash__(self) -> int:
        return self.number


class SimFuture(asyncio.Future):  # type: ignore[type-arg]
    """A future with a hash that does not depend on addresses."""

    def __init__(self, *, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self.number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng = rng
        self.now = 1000.0
        self.handles = 0
        self.executor_delay: Callable[[], float] = lambda: 0.0
        self.kept: list[SimTask] = []
        """All tasks, so that no task of a dead process is garbage-collected while the seed runs."""
        self.closing = False
        self._runnable: list[Process] = []
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count(1)
        self.set_task_factory(self._make_task)
        ROOT.queue.clear()
        ROOT.runs, ROOT.in_runnable = True, False

    # ------------------------------------------------------------ interface for asyncio

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._enqueue(handle)
        return handle

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer stays in the heap until it is due."""

    def create_future(self) -> SimFuture:
        return SimFuture(number=next(self._numbers), loop=self)

    def _make_task(self, loop: Any, coro: Any, **kwargs: Any) -> SimTask:
        task = SimTask(coro, number=next(self._numbers), loop=loop, **kwargs)
        self.kept.append(task)
        return task

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        """Run a function atomically, between two random delays."""
        future = self.create_future()
        self.call_later(
            self.executor_delay(), self._execute, future, functools.partial(func, *args)
        )
        return future

    def _execute(self, future: SimFuture, job: Callable[[], Any]) -> None:
        try:
            result, error = job(), None
        except Exception as raised:  # noqa: BLE001  (handed on)
            result, error = None, raised
        self.call_later(self.executor_delay(), settle, future, result, error)

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:
        current.get(ROOT).on_term = functools.partial(callback, *args)

    def remove_signal_handler(self, sig: int) -> bool:
        current.get(ROOT).on_term = None
        return True

    def _process_events(self, event_list: Any) -> None:
        """Do nothing: there is no selector."""

    # ------------------------------------------------------------ processes

    def spawn(self, process: Process, coro: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in a process."""
        return self.create_task(coro, context=context_of(process))

    def wake(self, process: Process) -> None:
        """Start or resume a process."""
        process.runs = True
        self._note(process)

    def _enqueue(self, handle: asyncio.Handle) -> None:
        process = handle._context.get(current, ROOT)  # type: ignore[attr-defined]
        process.queue.append(handle)
        if not process.in_runnable:
            self._note(process)

    def _note(self, process: Process) -> None:
        if process.runs and process.queue and not process.in_runnable:
            process.in_runnable = True
            self._runnable.append(process)

    def _run_once(self) -> None:
        timers = self._timers
        for _ in range(1000):
            while timers and timers[0][0] <= self.now:
                timer = heapq.heappop(timers)[2]
                if not timer._cancelled:  # type: ignore[attr-defined]
                    self._enqueue(timer)
            if self._runnable:
                self._run_any()
            elif not self._stopping:  # type: ignore[attr-defined]
                self._jump()
            if self._stopping:  # type: ignore[attr-defined]
                return
        if self.handles > MAX_HANDLES and not self.closing:
            raise Stuck(f"more than {MAX_HANDLES} handles were run")

    def _jump(self) -> None:
        """Advance the time to the next timer."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:  # type: ignore[attr-defined]
            heapq.heappop(timers)
        if not timers:
            raise Stuck("no process has anything left to wait for")
        self.now = timers[0][0]

    def _run_any(self) -> None:
        """Run the next handle of a random process."""
        runnable = self._runnable
        place = int(self.rng.random() * len(runnable))
        process = runnable[place]
        handle = process.queue.popleft() if process.runs and process.queue else None
        if handle is None or not process.queue:
            runnable[place] = runnable[-1]
            runnable.pop()
            process.in_runnable = False
        if handle is not None and not handle._cancelled:  # type: ignore[attr-defined]
            self.handles += 1
            self.now += STEP_S
            handle._run()  # type: ignore[attr-defined]


def context_of(process: Process) -> contextvars.Context:
    """Return a new context in which all handles belong to `process`."""
    context = contextvars.Context()
    context.run(current.set, process)
    return context


def end_all(loop: VirtualLoop, processes: list[Process]) -> None:
    """Cancel every task and let even those of dead processes unwind, so that nothing is left.

    Only when the seed is over: in real life a killed process unwinds nothing.
    """
    loop.closing = True
    for process in [*processes, ROOT]:
        process.dead = False
        loop.wake(process)
    for _ in range(50):
        left = [task for task in loop.kept if not task.done()]
        if not left:
            break
        for task in left:
            task.cancel()
        loop.run_until_complete(_turns())
    for task in loop.kept:
        if task.done() and not task.cancelled():
            task.exception()


async def _turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0.001)
