"""Environments of libraries that block: their calls run in threads, so that the loop never waits.

A thread cannot be stopped. One that an episode left behind in a call keeps its place until that
call returns, and the environment it is in is closed only then.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from arealite.base.errors import EpisodeError
from arealite.base.log import get

T = TypeVar("T")
log = get(__name__)


class EnvStuck(EpisodeError):
    """All threads are in calls that their episodes no longer wait for."""

    failure_class = "env_stuck"


class Threads:
    """Runs at most `count` blocking calls at a time. They hold up no process that ends."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._left = 0
        """Threads whose callers have gone."""
        self._free = asyncio.Semaphore(count)

    async def call(
        self, function: Callable[..., T], *args: Any, drop: Callable[[T], object] | None = None
    ) -> T:
        """Return what `function(*args)` returns; `drop` gets it where nobody waits any more.

        Raises:
            EnvStuck: no thread will come free.
        """
        if self._left >= self.count:
            raise EnvStuck(
                f"all {self.count} threads hang in the environment's own code. "
                "Use env.runtime.type=subprocess: a process can be killed."
            )
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            self._free.release()
            if not done.cancelled():
                done.set_result((result, error))
                return
            self._left -= 1
            if error is None and drop is not None:
                start(drop, result)

        def work() -> None:
            ended = outcome(function, *args)
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, *ended)

        start(work)
        try:
            result, error = await done
        except asyncio.CancelledError:
            if done.cancelled():
                self._left += 1
            elif drop is not None and done.result()[1] is None:
                start(drop, done.result()[0])
            raise
        if error is not None:
            raise error
        return result


class Instance:
    """One environment and its calls, which follow each other."""

    def __init__(self, env: Any, threads: Threads) -> None:
        self.env = env
        self._threads = threads
        self._lock = threading.Lock()

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Return what `function(*args)` returns, in a thread."""
        return await self._threads.call(self._alone, function, *args)

    def close(self) -> None:
        """Close the environment after the call that it may be in."""
        try:
            self._alone(getattr(self.env, "close", int))
        except Exception as error:  # noqa: BLE001  (other people's code; the episode is over)
            log.warning("environment not closed", error=repr(error))

    def _alone(self, function: Callable[..., T], *args: Any) -> T:
        with self._lock:
            return function(*args)


def start(function: Callable[..., object], *args: Any) -> None:
    """Run a call in a thread of its own that the process does not wait for."""
    threading.Thread(target=function, args=args, daemon=True, name="environment").start()


def outcome(function: Callable[..., T], *args: Any) -> tuple[T | None, BaseException | None]:
    """Return what a call returns and what it raises, one of them None."""
    try:
        return function(*args), None
    except BaseException as error:  # noqa: BLE001  (it is raised where it is waited for)
        return None, error
