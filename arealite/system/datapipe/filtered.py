"""Counts the groups that are filtered in a row, while no group is completed.

If every group is filtered, the run samples without end and trains no step.
"""

import json
import sqlite3
import time
from collections import Counter

from arealite.system.health.waits import GROUP_FILTER, Wait, table
from arealite.system.ledger.group import Group
from arealite.system.ledger.ledger import Ledger

META_KEY = "filtered_in_row"
"""Key of the counts in the ledger's table `meta`."""
REPORTED_FROM = 64
"""Number of groups filtered in a row from which console and `arealite why` report them."""
STALE = "stale"
"""Reason of groups that were complete before, and became too old because steps were trained."""
FIXES = {
    "zero_variance": "In each group all rewards are equal: correct the reward, choose tasks that "
    "the model sometimes solves, or set trainer.ppo.filter_zero_variance=false",
    "failed": "`arealite audit RUN` lists the failed episodes by class: correct their cause",
}
"""The advice for a reason, by its part before the colon."""
OTHER_FIX = "`arealite audit RUN` lists the filtered groups by reason"


class FilterStreak:
    """The groups filtered since the last complete group, counted by reason.

    The count is written in the transaction that closes the group, so it is exact after a restart
    of the datapipe. It begins anew when a trainer starts: the user may have changed the options.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.counts = Counter[str]()
        """Number of groups by reason."""

    @property
    def length(self) -> int:
        """Number of groups filtered in a row."""
        return self.counts.total()

    def load(self, db: sqlite3.Connection) -> None:
        """Load the counts from the ledger."""
        row = db.execute("SELECT value FROM meta WHERE key = ?", (META_KEY,)).fetchone()
        self.counts = Counter(json.loads(row[0]) if row else {})

    def record(self, group: Group) -> None:
        """Count a filtered group; reset the counts if the group is complete."""
        if group.state == "complete":
            self.reset()
        elif group.reason is not None and group.reason != STALE:
            self.counts[group.reason] += 1
            self._store()

    def reset(self) -> None:
        """Begin to count anew."""
        if self.counts:
            self.counts.clear()
            self._store()

    def describe(self) -> str:
        """Return a text with number and reasons, and the advice for the most frequent one.

        At least one group must be filtered.
        """
        reasons = [reason for reason, _ in self.counts.most_common()]
        counted_reasons = ", ".join(f"{self.counts[reason]} {reason}" for reason in reasons)
        kind, _, _ = reasons[0].partition(":")
        return (
            f"{self.length:,} groups in a row were filtered, and none was completed: "
            f"{counted_reasons}. {FIXES.get(kind, OTHER_FIX)}"
        )

    def _store(self) -> None:
        self.ledger.set_meta(META_KEY, json.dumps(self.counts))


class FilterWait:
    """The wait that the table of waits has while groups filtered in a row are reported."""

    def __init__(self) -> None:
        self._wait = Wait(event="an unfiltered group", owner=GROUP_FILTER, on="datapipe-0")

    def report(self, detail: str) -> None:
        """Publish `detail` as a wait that `diagnosis` reports; remove the wait if it is ""."""
        wait = self._wait
        wait.detail = detail
        if not detail:
            table.discard(wait)
        elif wait not in table:
            wait.since = time.monotonic()
            table.add(wait)
