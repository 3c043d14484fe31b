"""Where a trial keeps its files, so that no other module joins these paths.

A trial is `<run_root>/<experiment_name>/<trial_name>`; everything about it lies below that folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TMPFS = Path("/dev/shm")
"""Where weights are staged for servers of this host."""


@dataclass(frozen=True)
class RunPaths:
    """The files of one trial."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved config, as YAML; what every role of the run loads."""
        return self.root / "config.yaml"

    @property
    def configs(self) -> Path:
        """The configs of the run's starts, each by the first step trained under it."""
        return self.root / "configs"

    @property
    def starts(self) -> dict[int, Path]:
        """The same files by that step, in order."""
        return {int(file.stem): file for file in sorted(self.configs.glob("*.yaml"))}

    @property
    def ledger(self) -> Path:
        """The ledger, one SQLite file."""
        return self.root / "ledger.sqlite"

    @property
    def metrics(self) -> Path:
        """One JSON object a line, one line a step (and one an evaluation)."""
        return self.root / "metrics.jsonl"

    @property
    def token_stats(self) -> Path:
        """What reports show of each trained token, one file a step and rank."""
        return self.root / "token_stats"

    @property
    def report(self) -> Path:
        """The report, one HTML file."""
        return self.root / "report.html"

    @property
    def logs(self) -> Path:
        """One log file a process: `<role>-<index>.log`."""
        return self.root / "logs"

    @property
    def end(self) -> Path:
        """Exit code and error of the launcher that ended last; absent while one runs."""
        return self.root / "end.txt"

    @property
    def checkpoints(self) -> Path:
        """One folder a checkpoint: `step-000012`."""
        return self.root / "checkpoints"

    @property
    def critic(self) -> Path:
        """The critic's part of each checkpoint, under the same name."""
        return self.root / "critic"

    @property
    def export(self) -> Path:
        """The final model as a Hugging Face folder."""
        return self.root / "export"

    @property
    def weights(self) -> Path:
        """Where weights are staged for servers of several hosts."""
        return self.root / "weights"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard event files."""
        return self.root / "tensorboard"

    @property
    def logger_id(self) -> Path:
        """The run's name at services that loggers write to; made at the first start."""
        return self.root / "logger_id"
