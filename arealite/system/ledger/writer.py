"""Commits what is queued for the ledger from an event loop, without blocking it.

Apart from the ledger, because when to write has nothing to do with what is written.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from arealite.system.ledger.ledger import Ledger, Statement


class LedgerWriter:
    """Commits from the event loop, in a thread: at once after a quiet time or when asked to hurry,
    else one transaction for all of `interval_s`.

    While `run` runs, nobody else may write, except in a callback.
    """

    def __init__(self, ledger: Ledger, *, interval_s: float) -> None:
        self.ledger = ledger
        self.interval_s = interval_s
        self._callbacks: list[Callable[[], None]] = []
        self._wanted = asyncio.Event()
        self._hurry = asyncio.Event()
        self._is_closing = False
        self._busy_s = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")

    def want_commit(self) -> None:
        """Make everything queued so far durable soon."""
        self._wanted.set()

    def after_commit(self, callback: Callable[[], None], *, hurry: bool = False) -> None:
        """Call `callback` in the loop once everything queued so far is durable.

        `hurry` is for what somebody stands still for: it costs a transaction of its own.
        """
        self._callbacks.append(callback)
        self.want_commit()
        if hurry:
            self._hurry.set()

    async def run(self) -> None:
        """Commit whenever asked, until `close`.

        Raises:
            InvariantError: the file cannot be written any more.
        """
        loop = asyncio.get_running_loop()
        due = loop.time()
        try:
            while self._wanted.is_set() or not self._is_closing:
                await self._wanted.wait()
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(due):  # gather company for the transaction
                        await self._hurry.wait()
                due = loop.time() + self.interval_s
                self._wanted.clear()
                if not self._is_closing:
                    self._hurry.clear()
                callbacks, self._callbacks = self._callbacks, []
                if statements := self.ledger.take():
                    job = loop.run_in_executor(self._thread, self._execute, statements)
                    self._busy_s += await job
                for callback in callbacks:
                    callback()
        finally:
            self._thread.shutdown(wait=True)

    def _execute(self, statements: list[Statement]) -> float:
        begin = time.perf_counter()
        self.ledger.execute(statements)
        return time.perf_counter() - begin

    def take_busy_s(self) -> float:
        """Return the seconds that the thread was in transactions since the last call."""
        taken, self._busy_s = self._busy_s, 0.0
        return taken

    def close(self) -> None:
        """Let `run` write what is queued and return."""
        self._is_closing = True
        self._wanted.set()
        self._hurry.set()
