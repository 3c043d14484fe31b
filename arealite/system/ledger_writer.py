"""Makes the ledger's writes durable from the event loop: one transaction for all of a few
milliseconds.

A thread of its own, because a commit blocks; callbacks, because an acknowledgement may only leave
after its commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from arealite.system.ledger import Ledger


class LedgerWriter:
    """Group commit. What is queued in the ledger is written in order; nobody else may write it."""

    def __init__(self, ledger: Ledger, *, interval_s: float) -> None:
        self.ledger = ledger
        self.interval_s = interval_s
        self.transactions = 0
        self._callbacks: list[Callable[[], None]] = []
        self._wanted = asyncio.Event()
        self._is_closing = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")

    def after_commit(self, callback: Callable[[], None]) -> None:
        """Call `callback` in the loop once everything queued so far is durable."""
        self._callbacks.append(callback)
        self._wanted.set()

    async def run(self) -> None:
        """Commit whenever asked, until `close`.

        Raises:
            InvariantError: the file cannot be written any more.
        """
        loop = asyncio.get_running_loop()
        try:
            while not (self._is_closing and not self._callbacks):
                await self._wanted.wait()
                if not self._is_closing:
                    await asyncio.sleep(self.interval_s)  # gather company for the transaction
                self._wanted.clear()
                callbacks, self._callbacks = self._callbacks, []
                statements = self.ledger.take()
                await loop.run_in_executor(self._thread, self.ledger.execute, statements)
                self.transactions += 1
                for callback in callbacks:
                    callback()
        finally:
            self._thread.shutdown(wait=True)

    def close(self) -> None:
        """Let `run` write what is queued and return."""
        self._is_closing = True
        self._wanted.set()
