"""The paths of a trial's files. All are in the folder <run_root>/<experiment_name>/<trial_name>."""

import re
from pathlib import Path

from arealite.base.errors import UserError

TMPFS = Path("/dev/shm")
"""Folder of staged weights for servers of this host."""


class RunPaths:
    """The files of a trial."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.yaml"
        """The resolved config as YAML: the record of the run. No role reads it."""
        self.resolved = root / "config.msgpack"
        """The same config, for the roles of the run (base.config_tree.write)."""
        self.server = root / "llm_server.msgpack"
        """The config of the servers that the run starts."""
        self.configs = root / "configs"
        """The configs of the run's starts, named by the first step trained with each."""
        self.ledger = root / "ledger.sqlite"
        """The ledger, one SQLite file."""
        self.metrics = root / "metrics.jsonl"
        """One JSON object per line: a step or an evaluation."""
        self.token_stats = root / "token_stats"
        """Statistics of each trained token for the report, one file per step and rank."""
        self.report = root / "report.html"
        """The report, one HTML file."""
        self.logs = root / "logs"
        """One log file per process: `<role>-<index>.log`."""
        self.end = root / "end.txt"
        """Exit code and error of the last launcher; missing while a launcher runs."""
        self.checkpoints = root / "checkpoints"
        """One folder per checkpoint, for example `step-000012`."""
        self.export = root / "export"
        """The final model as a Hugging Face folder."""
        self.weights = root / "weights"
        """Staged weights for servers of several hosts."""
        self.tensorboard = root / "tensorboard"
        """TensorBoard event files."""
        self.logger_id = root / "logger_id"
        """The run's id at the services of metric loggers; written at the first start."""

    @property
    def starts(self) -> dict[int, Path]:
        """The files of `configs` by the first step trained with each, in order."""
        return {int(file.stem): file for file in sorted(self.configs.glob("*.yaml"))}


def step_of(name: str) -> int:
    """Return a step that is written as 40, step-40, or as a checkpoint's folder, step-000040.

    Raises:
        UserError: `name` has another form.
    """
    form = re.fullmatch(r"(?:step-)?([0-9]+)", name)
    if form is None:
        raise UserError(f"{name} is no step of a run. Write 40 or step-40.")
    return int(form[1])
