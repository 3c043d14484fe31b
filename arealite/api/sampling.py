"""What `arealite eval` and `arealite collect` may be told besides what a run is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from arealite.api.config import ExperimentConfig, run_paths
from arealite.api.fields import opt, sub


@dataclass(frozen=True, kw_only=True)
class SamplingRunConfig(ExperimentConfig):
    """An experiment of which tasks are only sampled."""

    n: int = opt(1, "samples a task", at_least=1)
    tasks: int = opt(0, "first tasks of the data; 0 takes all", at_least=0)
    name: str = opt("samples", "folder of the samples, below the trial's")
    out: str | None = opt(None, "file of the result")

    @property
    def folder(self) -> Path:
        """Where samples are kept until they are all there."""
        return run_paths(self).root / self.name


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(SamplingRunConfig):
    """Root of `arealite eval`."""

    name: str = opt("eval", "folder of the samples, below the trial's; one an evaluation")
    out: str | None = opt(None, "JSON file of the result; null: eval.json in that folder")
    k: list[int] = sub(list, "of pass@k, up to n; []: powers of two, and n")
    solved: float = opt(1.0, "reward from which a sample is right")


@dataclass(frozen=True, kw_only=True)
class CollectConfig(SamplingRunConfig):
    """Root of `arealite collect`."""

    name: str = opt("collect", "folder of the samples, below the trial's; one a collection")
    out: str | None = opt(None, "file.parquet or file.jsonl of the result; required")
    min_reward: float | None = opt(None, "leaves out what has less")
    max_reward: float | None = opt(None, "leaves out what has more")
    best_of: int = opt(0, "keeps so many of a task and seat, the best; 0 keeps all", at_least=0)
