"""The root configs of `arealite eval` and `arealite collect`: a run's options and their own."""

from dataclasses import dataclass
from pathlib import Path

from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.api.fields import opt, sub


@dataclass(frozen=True, kw_only=True)
class SamplingRunConfig(ExperimentConfig):
    """An experiment that samples tasks and trains nothing."""

    n: int = opt(1, "samples per task", at_least=1)
    tasks: int = opt(0, "number of tasks to use, from the first; 0: all", at_least=0)
    name: str = opt("samples", "folder of the samples, inside the trial's folder")
    out: str | None = opt(None, "file of the result")

    @property
    def folder(self) -> Path:
        """Folder of the samples."""
        return run_paths(self).root / self.name

    @property
    def split(self) -> str:
        """The option of `dataset` with the tasks: "eval" or "train"."""
        return "train"


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(SamplingRunConfig):
    """Root of `arealite eval`."""

    name: str = opt("eval", "folder of the samples, in the trial's folder; one per evaluation")
    out: str | None = opt(None, "JSON file of the result; null: eval.json in that folder")
    k: list[int] = sub(list, "values of k in pass@k, at most n; []: powers of two, and n")
    solved: float = opt(1.0, "smallest reward of a right sample")

    @property
    def split(self) -> str:
        return "eval"


@dataclass(frozen=True, kw_only=True)
class CollectConfig(SamplingRunConfig):
    """Root of `arealite collect`."""

    name: str = opt("collect", "folder of the samples, in the trial's folder; one per collection")
    out: str | None = opt(None, "file.parquet or file.jsonl of the result; required")
    min_reward: float | None = opt(None, "skip samples with a lower reward")
    max_reward: float | None = opt(None, "skip samples with a higher reward")
    best_of: int = opt(0, "best samples to keep of each task and seat; 0: all", at_least=0)
