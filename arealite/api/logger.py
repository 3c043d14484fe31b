"""Metric loggers get one flat dict of numbers a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from arealite.base.registry import Registry


class MetricLogger(ABC):
    """Writes metrics somewhere people look."""

    @abstractmethod
    def __init__(self, run_root: Path) -> None:
        """Open below the run's folder."""

    @classmethod  # noqa: B027  (optional hook)
    def check(cls) -> None:
        """Refuse a run, with a UserError, where what the logger needs is not there."""

    @abstractmethod
    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write metrics, named `group/name`: of step `step`, counted from 1, or of an evaluation
        after it (0: before the first step)."""

    def rewind(self, step: int) -> None:  # noqa: B027  (optional hook)
        """Forget metrics of later steps and evaluations at `step` or later: a resumed run repeats
        them."""

    @abstractmethod
    def close(self) -> None:
        """Flush and close."""


loggers: Registry[MetricLogger] = Registry(
    "logger",
    {
        "jsonl": "arealite.impl.logger.jsonl:JSONLLogger",
        "tensorboard": "arealite.impl.logger.tensorboard:TensorBoardLogger",
        "trackio": "arealite.impl.logger.services:TrackioLogger",
        "wandb": "arealite.impl.logger.services:WandbLogger",
    },
)
