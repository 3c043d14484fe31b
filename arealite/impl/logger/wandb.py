"""Writes metrics to Weights & Biases: the experiment is the project, the trial is the run.

A run that is resumed goes on in the same W&B run. W&B takes back no row, so each row carries its
`step`, which is the axis of all charts: steps that are trained again stand there twice, and the
later row counts; an evaluation stands at the step it was asked at. What could not be sent lies in
the run's folder, below `wandb/`, for `wandb sync`. The key is W&B's own matter (WANDB_API_KEY or
`wandb login`); WANDB_MODE=offline sends nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from arealite.api.logger import MetricLogger
from arealite.base.errors import UserError
from arealite.base.extras import extra, ours
from arealite.impl.logger.identity import config_of, run_id

PIP = ours("wandb")
UPLOAD_S = 20.0
"""For the run to be begun, and for its last rows to be sent; below what the trainer waits."""
CHOICES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "NETRC")
LOGINS = ("~/.netrc", "~/_netrc", "~/.config/wandb/settings")
"""Where W&B looks for a key: one of these is there, or it has none."""
SETTINGS = {"console": "off", "disable_git": True, "save_code": False, "silent": True}
"""Nothing of the host but metrics and config: what is printed may hold samples."""


class WandbLogger(MetricLogger):
    """One row a step, and one an evaluation."""

    def __init__(self, run_root: Path) -> None:
        self.root = run_root
        self._wandb = extra("wandb", PIP)
        self._run: Any = None

    @classmethod
    def check(cls) -> None:
        """Refuse a run without the package or without a key."""
        extra("wandb", PIP)
        files = [Path(name).expanduser().exists() for name in LOGINS]
        if not any(map(os.environ.get, CHOICES)) and not any(files):
            raise UserError("no key for W&B. Set WANDB_API_KEY, or WANDB_MODE=offline.")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if self._run is None:
            limits = {"init_timeout": UPLOAD_S, "finish_timeout": UPLOAD_S}
            self._run = self._wandb.init(
                project=self.root.parent.name,
                name=self.root.name,
                id=run_id(self.root),
                resume="allow",
                dir=self.root,
                config=config_of(self.root),
                allow_val_change=True,
                settings=self._wandb.Settings(**SETTINGS, **limits),
            )
            self._run.define_metric("*", step_metric="step")
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        try:
            if self._run is not None:
                self._run.finish()
        finally:
            self._wandb.teardown()  # here: at the process's exit it would be waited for
