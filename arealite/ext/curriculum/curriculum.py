"""Draws the next task: its class by the success rate, then the next row of this class.

A class that is solved always or never is drawn less often. Without `datapipe.curriculum.by`, all
rows are of one class. The state is read from the ledger, so a resumed run draws the same tasks as
an uninterrupted run.
"""

import random
import sqlite3
from collections import Counter
from collections.abc import Sequence

from arealite.api.datapipe_config import CurriculumConfig
from arealite.api.task import Task
from arealite.base.errors import UserError
from arealite.ext.curriculum.task_weights import learnability, success_rate
from arealite.system.data.dataset import permutation
from arealite.system.ledger.group import Group

SHARES = """
SELECT seq, row, (SELECT AVG(reward >= ?) FROM trajectories t WHERE t.group_id = g.group_id) share
FROM groups g WHERE state NOT IN ('offered', 'leased') AND share NOTNULL ORDER BY seq DESC"""
"""Selects the share of successes of each closed group, newest group first."""


class Curriculum:
    """The classes of the dataset's rows, and the success rate of each class."""

    def __init__(
        self,
        options: CurriculumConfig,
        train: Sequence[Task],
        *,
        seed: int,
        shuffle: bool,
    ) -> None:
        """Group the rows by the value of `extra_info[options.by]`.

        Raises:
            UserError: all rows are of one class, although `by` is set.
        """
        self.options = options
        self.seed = seed
        self.shuffle = shuffle
        self.class_of = [str(task.extra_info.get(options.by, "")) for task in train]
        """The class of each row."""
        self.rows: dict[str, list[int]] = {}
        """The rows of each class."""
        for row, name in enumerate(self.class_of):
            self.rows.setdefault(name, []).append(row)
        if options.by and len(self.rows) < 2:
            raise UserError(
                f"datapipe.curriculum.by={options.by}: all rows are of one class, "
                f"'{self.class_of[0]}'. "
                "Set it to a key of extra_info with at least two values."
            )
        self.offered = Counter[str]()
        """By class: number of groups created."""
        self.recent: dict[str, dict[int, float]] = {}
        """By class and seq: share of successes in each of the newest `window` groups."""
        self._orders: dict[str, tuple[int, Sequence[int]]] = {}
        """By class: an epoch, and the order of the rows in that epoch."""

    def load(self, db: sqlite3.Connection) -> None:
        """Load the state from the ledger."""
        self.offered.clear()
        for row, count in db.execute("SELECT row, COUNT(*) FROM groups GROUP BY row"):
            self.offered[self.class_of[row]] += count
        self.recent = {name: {} for name in self.rows}
        for seq, row, share in db.execute(SHARES, (self.options.threshold,)):
            self._add_share(self.class_of[int(row)], int(seq), float(share))
            counts = {len(shares) for shares in self.recent.values()}
            if counts == {self.options.window}:  # the rest is older
                break

    def record(self, group: Group) -> None:
        """Update the success rate from a closed group; ignore a group without scores."""
        rewards = [header.reward for header in group.headers if header.reward is not None]
        if not rewards:
            return
        num_successes = sum(reward >= self.options.threshold for reward in rewards)
        share = num_successes / len(rewards)
        self._add_share(self.class_of[group.row], group.seq, share)

    def draw(self, seq: int) -> tuple[int, int]:
        """Draw a class by weight; return the epoch of the class and its next row.

        Args:
            seq: Number of the new group; together with the run's seed, it seeds the draw.
        """
        names = list(self.rows)
        weights = [self.weight(name) for name in names]
        rng = random.Random(f"{self.seed}/curriculum/{seq}")
        (name,) = rng.choices(names, weights)
        rows = self.rows[name]
        epoch, place = divmod(self.offered[name], len(rows))
        self.offered[name] += 1
        order = self._order(name, epoch)
        return epoch, rows[order[place]]

    def weight(self, name: str) -> float:
        """Return the unnormalised probability of a class: its number of rows × learnability."""
        rate = success_rate(self.recent[name].values())
        num_rows = len(self.rows[name])
        return num_rows * learnability(rate, floor=self.options.floor)

    def metrics(self) -> dict[str, float]:
        """Return the probability of each class, and its success rate if a group of it has closed.

        {} without `options.by`.
        """
        if not self.options.by:
            return {}
        weights = {name: self.weight(name) for name in self.rows}
        total_weight = sum(weights.values())
        metrics = dict[str, float]()
        for name, weight in weights.items():
            metrics[f"curriculum/{name}/share"] = weight / total_weight
        for name, shares in self.recent.items():
            if shares:
                metrics[f"curriculum/{name}/success"] = success_rate(shares.values())
        return metrics

    def _add_share(self, name: str, seq: int, share: float) -> None:
        """Add the share of successes of a closed group; keep the newest `window` groups."""
        shares = self.recent[name]
        shares[seq] = share
        if len(shares) > self.options.window:
            oldest_seq = min(shares)
            del shares[oldest_seq]

    def _order(self, name: str, epoch: int) -> Sequence[int]:
        """Return the order of the rows of a class in an epoch, as indices into `rows[name]`."""
        num_rows = len(self.rows[name])
        if not self.shuffle:
            return range(num_rows)
        cached_epoch, order = self._orders.get(name, (None, ()))
        if cached_epoch != epoch:
            order = permutation(self.seed, epoch, num_rows)
            self._orders[name] = (epoch, order)
        return order
