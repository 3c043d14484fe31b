"""Chooses the class of the next task by success: what is learned or out of reach comes less often.

Its state is read from the ledger, so that a run that goes on draws what it would have drawn.
"""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from collections.abc import Sequence

from arealite.algo.curriculum import learnability, success_rate
from arealite.api.config import ExperimentConfig
from arealite.api.task import Task
from arealite.base.errors import UserError
from arealite.system.data.dataset import permutation
from arealite.system.ledger.group import Group

SHARES = """
SELECT seq, row, (SELECT AVG(reward >= ?) FROM trajectories t WHERE t.group_id = g.group_id) share
FROM groups g WHERE state NOT IN ('offered', 'leased') AND share NOTNULL ORDER BY seq DESC"""
"""Of successes in each group that has ended, the latest offered first."""


class Curriculum:
    """Classes of rows, how often each was offered, and what came of its latest groups."""

    def __init__(self, config: ExperimentConfig, train: Sequence[Task]) -> None:
        """Sort rows into classes.

        Raises:
            UserError: they are all of one class.
        """
        self.options = options = config.datapipe.curriculum
        self.seed, self.shuffle = config.seed, config.dataset.shuffle
        self.class_of = [str(task.extra_info.get(options.by, "")) for task in train]
        self.rows: dict[str, list[int]] = {name: [] for name in self.class_of}
        for row, name in enumerate(self.class_of):
            self.rows[name].append(row)
        if len(self.rows) < 2:
            raise UserError(
                f"datapipe.curriculum.by={options.by}: all rows are of one class, "
                f"'{self.class_of[0]}'. Name a key of extra_info that tells them apart."
            )
        self.offered = Counter[str]()
        self.recent: dict[str, dict[int, float]] = {}
        """By class and seq: the share of successes in each of its latest groups."""
        self._orders: dict[str, tuple[int, Sequence[int]]] = {}
        """By class: an epoch, and the order of its rows in that."""

    def load(self, db: sqlite3.Connection) -> None:
        """Read back what the ledger knows."""
        self.offered.clear()
        for row, count in db.execute("SELECT row, COUNT(*) FROM groups GROUP BY row"):
            self.offered[self.class_of[row]] += count
        self.recent = {name: {} for name in self.rows}
        for seq, row, share in db.execute(SHARES, (self.options.threshold,)):
            self._keep(self.class_of[int(row)], int(seq), float(share))
            if all(len(known) == self.options.window for known in self.recent.values()):
                break

    def note(self, group: Group) -> None:
        """Take in a group that has ended; one that has no trajectory tells nothing."""
        if headers := group.headers:
            share = sum(h.reward >= self.options.threshold for h in headers) / len(headers)
            self._keep(self.class_of[group.row], group.seq, share)

    def draw(self, seq: int) -> tuple[int, int]:
        """Return (epoch, row) of the next group: a class by chance, its rows in their order.

        An epoch is the class's own.
        """
        weights = {name: self.weight(name) for name in self.rows}
        rng = random.Random(f"{self.seed}/curriculum/{seq}")
        (name,) = rng.choices([*weights], [*weights.values()])
        epoch, place = divmod(self.offered[name], len(self.rows[name]))
        self.offered[name] += 1
        return epoch, self.rows[name][self._order(name, epoch)[place]]

    def weight(self, name: str) -> float:
        """Return how often a class is drawn, relative to others: by its rows and learnability."""
        rate = success_rate(self.recent[name].values())
        return len(self.rows[name]) * learnability(rate, floor=self.options.floor)

    def metrics(self) -> dict[str, float]:
        """Return each class's success rate and share of the draws."""
        weights = {name: self.weight(name) for name in self.rows}
        total = sum(weights.values())
        rates = {name: success_rate(known.values()) for name, known in self.recent.items()}
        return {f"curriculum/{name}/success": rate for name, rate in rates.items()} | {
            f"curriculum/{name}/share": weight / total for name, weight in weights.items()
        }

    def _keep(self, name: str, seq: int, share: float) -> None:
        known = self.recent[name]
        known[seq] = share
        if len(known) > self.options.window:
            del known[min(known)]

    def _order(self, name: str, epoch: int) -> Sequence[int]:
        size = len(self.rows[name])
        if not self.shuffle:
            return range(size)
        if self._orders.get(name, (None,))[0] != epoch:
            self._orders[name] = epoch, permutation(self.seed, epoch, size)
        return self._orders[name][1]
