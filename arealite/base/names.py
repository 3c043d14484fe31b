"""Where a trial keeps its files, so that no other module joins these paths.

A trial is `<run_root>/<experiment_name>/<trial_name>`; everything about it lies below that folder.
"""

from __future__ import annotations

from pathlib import Path

TMPFS = Path("/dev/shm")
"""Where weights are staged for servers of this host."""


class RunPaths:
    """The files of one trial."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.yaml"
        """The resolved config, as YAML; what every role of the run loads."""
        self.configs = root / "configs"
        """The configs of the run's starts, each by the first step trained under it."""
        self.ledger = root / "ledger.sqlite"
        """The ledger, one SQLite file."""
        self.metrics = root / "metrics.jsonl"
        """One JSON object a line, one line a step (and one an evaluation)."""
        self.token_stats = root / "token_stats"
        """What reports show of each trained token, one file a step and rank."""
        self.report = root / "report.html"
        """The report, one HTML file."""
        self.logs = root / "logs"
        """One log file a process: `<role>-<index>.log`."""
        self.end = root / "end.txt"
        """Exit code and error of the launcher that ended last; absent while one runs."""
        self.checkpoints = root / "checkpoints"
        """One folder a checkpoint: `step-000012`."""
        self.export = root / "export"
        """The final model as a Hugging Face folder."""
        self.weights = root / "weights"
        """Where weights are staged for servers of several hosts."""
        self.tensorboard = root / "tensorboard"
        """TensorBoard event files."""
        self.logger_id = root / "logger_id"
        """The run's name at services that loggers write to; made at the first start."""

    @property
    def starts(self) -> dict[int, Path]:
        """Return the files of `configs` by the first step trained under each, in order."""
        return {int(file.stem): file for file in sorted(self.configs.glob("*.yaml"))}
