"""Audits new records of the ledger after each checkpoint, and drops old payloads.

At the end of a run, only the records since the last checkpoint are left to audit. A payload is
dropped only after it passed an audit.
"""

import asyncio
from contextlib import suppress

from arealite.base import log
from arealite.base.errors import UserError
from arealite.ext.audit.audit import audit
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
        self._is_busy = False

    async def run(self) -> None:
        """Audit the records since the last audit. Waits for: a thread that reads the ledger."""
        if self._is_busy or self.stopped.is_set():
            return
        self._is_busy = True
        with suppress(RunEnded):
            try:
                path = self.ledger.path
                report = await asyncio.to_thread(
                    audit,
                    path,
                    new_only=True,
                    on_row=self._go_on,
                )
            except UserError as error:
                logger.error("ledger damaged", error=str(error))
                return
            finally:
                self._is_busy = False
            if not report.ok:
                logger.error("ledger out of balance", problems=report.problems)
                return
            self.ledger.mark_audited(report.mark)
            self.writer.after_commit(self._drop)

    def _go_on(self, *_: int) -> None:
        if self.stopped.is_set():
            raise RunEnded

    def _drop(self) -> None:
        """Drop the payloads of one step, and schedule the drop of the next step."""
        if self.kept and self.ledger.drop_payloads(self.kept):
            self.writer.after_commit(self._drop)
