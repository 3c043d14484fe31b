"""The order of the tasks: a permutation in each epoch, or the order of an installed sampler."""

import sqlite3
from collections.abc import Sequence

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.hooks import TaskSamplerMaker
from arealite.api.task import Task, TaskSampler
from arealite.base import entries
from arealite.system.data.dataset import permutation


class Permutation:
    """Draws each row once in an epoch; each epoch has its own order."""

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool) -> None:
        self.num_rows = num_rows
        self.seed = seed
        self.shuffle = shuffle
        self._epoch = -1
        """The epoch of `_order`."""
        self._order: Sequence[int] = range(num_rows)

    def load(self, db: sqlite3.Connection) -> None:
        """Ignore the ledger: a draw depends on its number only."""

    def draw(self, seq: int) -> tuple[int, int]:
        """Return the epoch and the row of draw number `seq`."""
        epoch, place = divmod(seq, self.num_rows)
        if self.shuffle and epoch != self._epoch:
            self._order = permutation(self.seed, epoch, self.num_rows)
            self._epoch = epoch
        return epoch, self._order[place]

    def record(self, seq: int, row: int, rewards: Sequence[float | None]) -> None:
        """Ignore the rewards: the order depends on none."""

    def metrics(self) -> dict[str, float]:
        """Return no metrics."""
        return {}


def make_sampler(config: ExperimentConfig, train: Sequence[Task]) -> TaskSampler:
    """Return the sampler of a run: the first of the installed ones that takes it, or Permutation.

    Raises:
        UserError: A sampler cannot order these tasks.
    """
    makers: list[TaskSamplerMaker] = entries.hooks("task_sampler")
    sampler = entries.first_result(makers, config, train)
    if sampler is not None:
        return sampler
    return Permutation(len(train), seed=config.seed, shuffle=config.dataset.shuffle)
