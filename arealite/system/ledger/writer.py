"""Commits the queued writes of a ledger and audits it, in threads beside the event loop.

New records are audited after each checkpoint. At the end of a run, only the records since the last
checkpoint are left to audit. A payload is dropped only after it passed an audit.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from arealite.api.hooks import LedgerAudit, LedgerReport
from arealite.base import entries, log
from arealite.base.errors import UserError
from arealite.system.ledger.ledger import Ledger

logger = log.get(__name__)


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


class RunEnded(Exception):
    """The run ended during an audit; the launcher audits the remaining records."""


class Upkeep:
    """Audits and prunes one ledger; at most one audit runs at a time."""

    def __init__(
        self,
        writer: LedgerWriter,
        stopped: asyncio.Event,
        *,
        keep_payloads: str,
    ) -> None:
        self.writer = writer
        self.ledger = writer.ledger
        self.stopped = stopped
        self.kept = 0 if keep_payloads == "all" else int(keep_payloads)
        self.audits: list[LedgerAudit] = entries.hooks("ledger_audit")
        self._is_busy = False

    async def run(self) -> None:
        """Audit the records since the last audit. Waits for: a thread that reads the ledger."""
        if self._is_busy or self.stopped.is_set():
            return
        self._is_busy = True
        with suppress(RunEnded):
            try:
                reports = [await self._report(audit) for audit in self.audits]
            except UserError as error:
                logger.error("ledger damaged", error=str(error))
                return
            finally:
                self._is_busy = False
            problems = [problem for report in reports for problem in report.problems]
            if not all(report.ok for report in reports):
                logger.error("ledger out of balance", problems=problems)
                return
            for mark in filter(None, [report.mark for report in reports]):
                self.ledger.mark_audited(mark)
            self.writer.after_commit(self._drop)

    async def _report(self, audit: LedgerAudit) -> LedgerReport:
        return await asyncio.to_thread(
            audit,
            self.ledger.path,
            new_only=True,
            on_row=self._go_on,
        )

    def _go_on(self, *_: int) -> None:
        if self.stopped.is_set():
            raise RunEnded

    def _drop(self) -> None:
        """Drop the payloads of one step, and schedule the drop of the next step."""
        if self.kept and self.ledger.drop_payloads(self.kept):
            self.writer.after_commit(self._drop)
