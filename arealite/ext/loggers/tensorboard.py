"""Write metrics as TensorBoard scalars: `tensorboard --logdir runs` shows all runs.

torch's writer is imported with the first line, because only trainer rank 0 writes metrics.
"""

from pathlib import Path
from typing import Any

from arealite.api.logger import MetricLogger
from arealite.base.trial_files import RunPaths


class TensorBoardLogger(MetricLogger):
    """Writes one scalar per metric and step."""

    def __init__(self, run_root: Path) -> None:
        self.folder = str(RunPaths(run_root).tensorboard)
        self._writer: Any = None
        self._purge_step: int | None = None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(
                self.folder,
                purge_step=self._purge_step,
                flush_secs=10,
            )
        for name, number in metrics.items():
            self._writer.add_scalar(name, number, step)

    def rewind(self, step: int) -> None:
        self._purge_step = step + 1  # an evaluation at `step` appears twice

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
