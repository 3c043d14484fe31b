"""Loggers of services that show runs: Weights & Biases and trackio, which has W&B's interface."""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from pathlib import Path
from typing import Any

import yaml

from arealite.api.logger import MetricLogger
from arealite.base.errors import UserError
from arealite.base.extras import extra, ours
from arealite.base.names import RunPaths

UPLOAD_S = 20.0
"""For a W&B run to be begun, and for its last rows to be sent; below what the trainer waits."""
CHOICES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "NETRC")
LOGINS = ("~/.netrc", "~/_netrc", "~/.config/wandb/settings")
"""Where W&B looks for a key: one of these is there, or it has none."""
SETTINGS = {"console": "off", "disable_git": True, "save_code": False, "silent": True}
"""Nothing of the host but metrics and config: what is printed may hold samples."""


def run_id(run_root: Path) -> str:
    """Return the trial's name and the time of its first start.

    The run's folder keeps it, so a trial that is begun anew has another.
    """
    file = RunPaths(run_root).logger_id
    if not file.exists():
        run_root.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{run_root.name[:40]}-{time.strftime('%Y%m%d-%H%M%S')}")
    return file.read_text()


def config_of(run_root: Path) -> dict[str, Any]:
    """Return the run's resolved config; {} before there is one."""
    file = RunPaths(run_root).config
    return yaml.safe_load(file.read_text("utf-8")) if file.exists() else {}


class ServiceLogger(MetricLogger):
    """Writes through a package with W&B's interface: one row a step, and one an evaluation."""

    package: str

    def __init__(self, run_root: Path) -> None:
        self.root = run_root
        self.service = extra(self.package, ours(self.package))
        self.run: Any = None

    @classmethod
    def check(cls) -> None:
        """Refuse a run without the package."""
        extra(cls.package, ours(cls.package))

    @abstractmethod
    def begin(self, **shared: Any) -> Any:
        """Return a run of the service, begun with the arguments that all services share."""

    def begun(self) -> Any:
        """Return the run; the first call begins it."""
        if self.run is None:
            project, config = self.root.parent.name, config_of(self.root)
            self.run = self.begin(project=project, config=config, resume="allow")
        return self.run

    def close(self) -> None:
        if self.run is not None:
            self.run.finish()


class TrackioLogger(ServiceLogger):
    """Writes metrics to trackio: the experiment is the project, the trial is the run.

    Rows lie on this host, in the folder of all trackio projects (TRACKIO_DIR), unless trackio's own
    TRACKIO_SPACE_ID or TRACKIO_SERVER_URL names where to send them. A run that is resumed goes on
    in the same trackio run; trackio takes back no row, so steps that are trained again stand there
    twice.
    """

    package = "trackio"

    def begin(self, **shared: Any) -> Any:
        """Begin a run without trackio's page and its metrics of the host."""
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        return self.service.init(name=run_id(self.root), **quiet, **shared)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.begun().log(metrics, step=step)


class WandbLogger(ServiceLogger):
    """Writes metrics to Weights & Biases: the experiment is the project, the trial is the run.

    A run that is resumed goes on in the same W&B run. W&B takes back no row, so each row carries
    its `step`, which is the axis of all charts: steps that are trained again stand there twice, and
    the later row counts; an evaluation stands at the step it was asked at. What could not be sent
    lies in the run's folder, below `wandb/`, for `wandb sync`. The key is W&B's own matter
    (WANDB_API_KEY or `wandb login`); WANDB_MODE=offline sends nothing.
    """

    package = "wandb"

    @classmethod
    def check(cls) -> None:
        """Refuse a run without the package or without a key."""
        super().check()
        files = [Path(name).expanduser().exists() for name in LOGINS]
        if not any(map(os.environ.get, CHOICES)) and not any(files):
            raise UserError("no key for W&B. Set WANDB_API_KEY, or WANDB_MODE=offline.")

    def begin(self, **shared: Any) -> Any:
        """Begin or resume the run, with limits for the time of uploads."""
        limits = {"init_timeout": UPLOAD_S, "finish_timeout": UPLOAD_S}
        shared["settings"] = self.service.Settings(**SETTINGS, **limits)
        names = {"name": self.root.name, "id": run_id(self.root), "dir": self.root}
        run = self.service.init(**names, allow_val_change=True, **shared)
        run.define_metric("*", step_metric="step")
        return run

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.begun().log({"step": step, **metrics})

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.service.teardown()  # here: at the process's exit it would be waited for
