"""Writes metrics to trackio: the experiment is the project, the trial is the run.

Rows lie on this host, in the folder of all trackio projects (TRACKIO_DIR), unless trackio's own
TRACKIO_SPACE_ID or TRACKIO_SERVER_URL names where to send them. A run that is resumed goes on in
the same trackio run; trackio takes back no row, so steps that are trained again stand there twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from arealite.api.logger import MetricLogger
from arealite.base.extras import extra, ours
from arealite.impl.logger.identity import config_of, run_id

PIP = ours("trackio")


class TrackioLogger(MetricLogger):
    """One row a step, and one an evaluation, at the step's number."""

    def __init__(self, run_root: Path) -> None:
        self.root = run_root
        self._trackio = extra("trackio", PIP)
        self._run: Any = None

    @classmethod
    def check(cls) -> None:
        """Refuse a run without the package."""
        extra("trackio", PIP)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if self._run is None:
            self._run = self._trackio.init(
                project=self.root.parent.name,
                name=run_id(self.root),
                resume="allow",
                config=config_of(self.root),
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        self._run.log(metrics, step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
