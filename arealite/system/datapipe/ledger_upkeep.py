"""Audits new records of the ledger after each checkpoint, and drops old payloads.

At the end of a run, only the records since the last checkpoint are left to audit. A payload is
dropped only after it passed an audit.
"""

import asyncio
from contextlib import suppress

from arealite.api.hooks import LedgerAudit, LedgerReport
from arealite.base import entries, log
from arealite.base.errors import UserError
from arealite.system.ledger.writer import LedgerWriter

logger = log.get(__name__)


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
