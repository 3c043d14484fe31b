"""Draws the next task: its class by the success rate, then the next row of this class.

A class that is solved always or never is drawn less often. The state is read from the ledger, so a
resumed run draws the same tasks as an uninterrupted run.
"""

import random
import sqlite3
from collections import Counter
from collections.abc import Sequence

from arealite.api.experiment_config import CurriculumConfig, ExperimentConfig
from arealite.api.task import Task
from arealite.base.errors import UserError
from arealite.ext.curriculum.task_weights import learnability, success_rate
from arealite.system.data.dataset import Permutation

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
            UserError: all rows are of one class.
        """
        self.options = options
        self.seed = seed
        self.class_of = [str(task.extra_info.get(options.by, "")) for task in train]
        """The class of each row."""
        self.rows: dict[str, list[int]] = {}
        """The rows of each class."""
        for row, name in enumerate(self.class_of):
            self.rows.setdefault(name, []).append(row)
        if len(self.rows) < 2:
            raise UserError(
                f"datapipe.curriculum.by={options.by}: all rows are of one class, "
                f"'{self.class_of[0]}'. "
                "Set it to a key of extra_info with at least two values."
            )
        self.offered = Counter[str]()
        """By class: number of groups created."""
        self.recent: dict[str, dict[int, float]] = {}
        """By class and seq: share of successes in each of the newest `window` groups."""
        self._orders: dict[str, Permutation] = {}
        """The order of the rows of each class, as indices into `rows`."""
        for name, rows in self.rows.items():
            self._orders[name] = Permutation(
                len(rows),
                seed=seed,
                shuffle=shuffle,
            )

    def load(self, db: sqlite3.Connection) -> None:
        """Load the state from the ledger."""
        self.offered.clear()
        for row, count in db.execute("SELECT row, COUNT(*) FROM groups GROUP BY row"):
            name = self.class_of[row]
            self.offered[name] += count
        self.recent = {name: {} for name in self.rows}
        threshold = self.options.threshold
        for seq, row, share in db.execute(SHARES, (threshold,)):
            name = self.class_of[int(row)]
            self._add_share(name, int(seq), float(share))
            counts = {len(shares) for shares in self.recent.values()}
            if counts == {self.options.window}:  # the rest is older
                break

    def record(self, seq: int, row: int, rewards: Sequence[float | None]) -> None:
        """Update the success rate from a closed group; ignore a group without scores."""
        scores = [reward for reward in rewards if reward is not None]
        if not scores:
            return
        threshold = self.options.threshold
        num_successes = sum(score >= threshold for score in scores)
        share = num_successes / len(scores)
        name = self.class_of[row]
        self._add_share(name, seq, share)

    def draw(self, seq: int) -> tuple[int, int]:
        """Draw a class by weight; return the epoch of the class and its next row.

        Args:
            seq: Number of the new group; together with the run's seed, it seeds the draw.
        """
        names = list(self.rows)
        weights = [self.weight(name) for name in names]
        rng = random.Random(f"{self.seed}/curriculum/{seq}")
        (name,) = rng.choices(names, weights)
        number = self.offered[name]
        epoch, place = self._orders[name].draw(number)
        self.offered[name] = number + 1
        return epoch, self.rows[name][place]

    def weight(self, name: str) -> float:
        """Return the unnormalised probability of a class: its number of rows × learnability."""
        shares = self.recent[name]
        rate = success_rate(shares.values())
        num_rows = len(self.rows[name])
        return num_rows * learnability(rate, floor=self.options.floor)

    def metrics(self) -> dict[str, float]:
        """Return the probability of each class, and its success rate after its first group."""
        weights = {name: self.weight(name) for name in self.rows}
        total_weight = sum(weights.values())
        metrics = dict[str, float]()
        for name, weight in weights.items():
            metrics[f"curriculum/{name}/share"] = weight / total_weight
        for name, shares in self.recent.items():
            if shares:
                rate = success_rate(shares.values())
                metrics[f"curriculum/{name}/success"] = rate
        return metrics

    def _add_share(self, name: str, seq: int, share: float) -> None:
        """Add the share of successes of a closed group; keep the newest `window` groups."""
        shares = self.recent[name]
        shares[seq] = share
        if len(shares) > self.options.window:
            oldest_seq = min(shares)
            del shares[oldest_seq]


def curriculum_of(config: ExperimentConfig, train: Sequence[Task]) -> Curriculum | None:
    """Return the curriculum of a run; None without `datapipe.curriculum.by`."""
    options = config.datapipe.curriculum
    if not options.by:
        return None
    return Curriculum(
        options,
        train,
        seed=config.seed,
        shuffle=config.dataset.shuffle,
    )
