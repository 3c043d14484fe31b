"""Loggers for Weights & Biases and for trackio, which has W&B's interface."""

import os
import time
from abc import abstractmethod
from pathlib import Path
from typing import Any

from arealite.api.logger import MetricLogger
from arealite.base import config_tree
from arealite.base.errors import UserError
from arealite.base.extras import extra_requirement, import_optional
from arealite.base.trial_files import RunPaths

UPLOAD_S = 20.0
"""Time limit to start a W&B run and to send its last rows; less than isolated.CLOSE_S."""
CHOICES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "NETRC")
LOGINS = ("~/.netrc", "~/_netrc", "~/.config/wandb/settings")
"""Files in which W&B looks for a key, besides the environment variables CHOICES."""
SETTINGS = {"console": "off", "disable_git": True, "save_code": False, "silent": True}
"""Send metrics and config only: printed output may contain samples."""


def run_id(run_root: Path) -> str:
    """Return the id of a run: the trial's name and the time of its first start.

    The run's folder stores it, so a new run with the same name has another id.
    """
    file = RunPaths(run_root).logger_id
    if not file.exists():
        run_root.mkdir(parents=True, exist_ok=True)
        start_time = time.strftime("%Y%m%d-%H%M%S")
        file.write_text(f"{run_root.name[:40]}-{start_time}")
    return file.read_text()


def config_of(run_root: Path) -> dict[str, object]:
    """Return the run's resolved config; {} if it is not written yet."""
    file = RunPaths(run_root).resolved
    return config_tree.read(file) if file.exists() else {}


class ServiceLogger(MetricLogger):
    """Writes with a package that has W&B's interface: one row per step and per evaluation."""

    package: str

    def __init__(self, run_root: Path) -> None:
        self.root = run_root
        self.service = import_optional(self.package, extra_requirement(self.package))
        self.run: Any = None

    @classmethod
    def check(cls) -> None:
        """Check that the package is installed."""
        import_optional(cls.package, extra_requirement(cls.package))

    @abstractmethod
    def begin(self, **shared: object) -> object:
        """Begin a run of the service with the arguments that all services share; return it."""

    def get_run(self) -> Any:
        """Return the run; the first call begins it."""
        if self.run is None:
            self.run = self.begin(
                project=self.root.parent.name,
                config=config_of(self.root),
                resume="allow",
            )
        return self.run

    def close(self) -> None:
        if self.run is not None:
            self.run.finish()


class TrackioLogger(ServiceLogger):
    """Writes metrics to trackio: the experiment is the project, the trial is the run.

    Rows are stored on this host, in trackio's folder (TRACKIO_DIR), unless TRACKIO_SPACE_ID or
    TRACKIO_SERVER_URL is set. A resumed run continues the same trackio run. trackio cannot delete
    rows, so steps that are trained again appear twice.
    """

    package = "trackio"

    def begin(self, **shared: object) -> object:
        """Begin a run without trackio's page and without metrics of the host."""
        return self.service.init(
            name=run_id(self.root),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
            **shared,
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.get_run().log(metrics, step=step)


class WandbLogger(ServiceLogger):
    """Writes metrics to Weights & Biases: the experiment is the project, the trial is the run.

    A resumed run continues the same W&B run. W&B cannot delete rows, so each row has its `step`,
    which is the axis of all charts; steps that are trained again appear twice, and the later row
    counts. An evaluation has the step at which it was requested. Unsent rows are in the folder
    `wandb/` of the run, for `wandb sync`. Log in with WANDB_API_KEY or `wandb login`;
    WANDB_MODE=offline sends nothing.
    """

    package = "wandb"

    @classmethod
    def check(cls) -> None:
        """Check that the package is installed and a key is set."""
        super().check()
        has_variable = any(os.environ.get(name) for name in CHOICES)
        has_login_file = any(Path(file).expanduser().exists() for file in LOGINS)
        if not has_variable and not has_login_file:
            raise UserError("no key for W&B. Set WANDB_API_KEY, or WANDB_MODE=offline.")

    def begin(self, **shared: object) -> object:
        """Begin or resume the run, with time limits for uploads."""
        settings = self.service.Settings(
            **SETTINGS,
            init_timeout=UPLOAD_S,
            finish_timeout=UPLOAD_S,
        )
        run = self.service.init(
            name=self.root.name,
            id=run_id(self.root),
            dir=self.root,
            allow_val_change=True,
            settings=settings,
            **shared,
        )
        run.define_metric("*", step_metric="step")
        return run

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.get_run().log({"step": step, **metrics})

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.service.teardown()  # otherwise the exit of the process would wait for it
