"""Writes metrics as TensorBoard scalars.

Through torch's writer, which is imported when the logger is made: only trainer rank 0 has one.
"""

from __future__ import annotations

from pathlib import Path

from arealite.api.logger import MetricLogger
from arealite.base.names import RunPaths


class TensorBoardLogger(MetricLogger):
    """One scalar a metric, at the step's number."""

    def __init__(self, run_root: Path) -> None:
        self.folder = RunPaths(run_root).tensorboard
        self._writer = self._open(None)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def rewind(self, step: int) -> None:
        """Hide what was written of `step` and later (TensorBoard's purge): a resumed run does it
        again."""
        self._writer.close()
        self._writer = self._open(step)

    def close(self) -> None:
        self._writer.close()

    def _open(self, purge_step: int | None):
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self.folder), purge_step=purge_step, flush_secs=10)
