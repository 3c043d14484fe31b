"""Commits the queued writes of a ledger in a thread, so that the event loop is not blocked."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from arealite.system.ledger.ledger import Ledger


class LedgerWriter:
    """Groups writes into transactions.

    A transaction begins at once after `interval_s` without one, or if a callback has `hurry`;
    otherwise at the end of the interval. While `run` runs, only its callbacks may write.
    """

    def __init__(self, ledger: Ledger, *, interval_s: float) -> None:
        self.ledger = ledger
        self.interval_s = interval_s
        self._callbacks: list[Callable[[], None]] = []
        self._requested = asyncio.Event()
        self._hurry = asyncio.Event()
        self._is_closing = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")

    def request_commit(self) -> None:
        """Request a commit of all queued writes."""
        self._requested.set()

    def after_commit(self, callback: Callable[[], None], *, hurry: bool = False) -> None:
        """Call `callback` in the event loop once all writes queued so far are durable.

        Args:
            callback: Called without arguments; it may write to the ledger.
            hurry: Commit now, in a transaction of its own: a process is blocked until then.
        """
        self._callbacks.append(callback)
        self.request_commit()
        if hurry:
            self._hurry.set()

    async def run(self) -> None:
        """Commit on request until `close`.

        Raises:
            InvariantError: the file cannot be written.
        """
        loop = asyncio.get_running_loop()
        due = loop.time()
        try:
            while self._requested.is_set() or not self._is_closing:
                await self._requested.wait()
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(due):  # more writes may join
                        await self._hurry.wait()
                due = loop.time() + self.interval_s
                self._requested.clear()
                if not self._is_closing:
                    self._hurry.clear()
                callbacks = self._callbacks
                self._callbacks = []
                if statements := self.ledger.take():
                    await loop.run_in_executor(self._thread, self.ledger.execute, statements)
                for callback in callbacks:
                    callback()
        finally:
            self._thread.shutdown(wait=True)

    def close(self) -> None:
        """Make `run` commit the queued writes and return."""
        self._is_closing = True
        self._requested.set()
        self._hurry.set()
