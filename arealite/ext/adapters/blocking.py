"""Run blocking environments of libraries in threads, so that they do not block the event loop.

A thread cannot be stopped. If an episode is cancelled during a call, the thread stays busy until
the call returns, and the environment is closed afterwards.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, TypeVarTuple

from arealite.base.errors import EpisodeError
from arealite.base.log import get

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
log = get(__name__)


class EnvStuck(EpisodeError, failure_class="env_stuck"):
    """All threads are busy with calls of cancelled episodes."""


class Threads:
    """Runs at most `count` blocking calls at a time. Its threads do not delay a process's exit."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._abandoned = 0
        """Number of busy threads whose callers were cancelled."""
        self._free = asyncio.Semaphore(count)

    async def call(
        self,
        function: Callable[[*Ts], T],
        *args: *Ts,
        drop: Callable[[T], object] | None = None,
    ) -> T:
        """Return the result of `function(*args)`, run in a thread.

        Args:
            function: A blocking function.
            args: Its arguments.
            drop: Called with the result, in a thread, if the caller was cancelled.

        Raises:
            EnvStuck: All threads are busy with calls of cancelled episodes.
        """
        if self._abandoned >= self.count:
            raise EnvStuck(
                f"all {self.count} threads hang in the environment's code. "
                "Set env.runtime.type=subprocess: a child process can be killed."
            )
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        done.add_done_callback(lambda _: self._free.release())

        def work() -> None:
            ended = outcome(function, *args)
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(done.set_result, ended)

        def drop_result(_: object) -> None:
            self._abandoned -= 1
            result, error = done.result()
            if error is None and drop is not None:
                start(drop, result)

        start(work)
        try:
            result, error = await asyncio.shield(done)
        except asyncio.CancelledError:
            self._abandoned += 1
            done.add_done_callback(drop_result)
            raise
        if error is not None:
            raise error
        return result


class Instance:
    """One environment of a library, whose calls run one after the other."""

    def __init__(self, env: Any, threads: Threads) -> None:
        self.env = env
        self._threads = threads
        self._lock = threading.Lock()

    async def call(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Return the result of `function(*args)`, run in a thread."""
        return await self._threads.call(self._locked, function, *args)

    def close(self) -> None:
        """Close the environment, after the end of a running call."""
        try:
            self._locked(getattr(self.env, "close", int))
        except Exception as error:  # noqa: BLE001  (library code; the episode is already over)
            log.warning("environment failed to close", error=repr(error))

    def _locked(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        with self._lock:
            return function(*args)


def start(function: Callable[[*Ts], object], *args: *Ts) -> None:
    """Run a function in a new daemon thread."""
    thread = threading.Thread(
        target=function,
        args=args,
        daemon=True,
        name="environment",
    )
    thread.start()


def outcome(function: Callable[[*Ts], object], *args: *Ts) -> tuple[Any, BaseException | None]:
    """Return the result and the exception of a call; one of them is None."""
    try:
        return function(*args), None
    except BaseException as error:  # noqa: BLE001  (`Threads.call` raises it in its caller)
        return None, error
