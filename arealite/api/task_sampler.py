"""The interface of task samplers, which choose the task of each new group."""

import sqlite3
from collections.abc import Sequence
from typing import Protocol


class TaskSampler(Protocol):
    """Draws the next task.

    Its state is read from the ledger, so that a resumed run draws the same tasks as an
    uninterrupted run.
    """

    def load(self, db: sqlite3.Connection) -> None:
        """Load the state from the ledger, at the start and after a roll-back."""
        ...

    def draw(self, seq: int) -> tuple[int, int]:
        """Return the epoch and the row of group number `seq`. The numbers come in order."""
        ...

    def record(self, seq: int, row: int, rewards: Sequence[float | None]) -> None:
        """Note the rewards of a closed group; None stands for a trajectory without a score."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return metrics of the draws."""
        ...
