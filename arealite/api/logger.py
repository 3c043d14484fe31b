"""The metric-logger interface. A logger gets one flat dict of numbers per step."""

from abc import ABC, abstractmethod
from pathlib import Path

from arealite.base.registry import Registry


class MetricLogger(ABC):
    """Writes metrics to a file or a service."""

    @abstractmethod
    def __init__(self, run_root: Path) -> None:
        """Open the logger of the run whose folder is `run_root`."""

    @classmethod  # noqa: B027  (optional hook)
    def check(cls) -> None:
        """Check before a run that the logger can work.

        Raises:
            UserError: A package or a login is missing.
        """

    @abstractmethod
    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of a step, or of an evaluation after it.

        Args:
            step: The step, from 1; 0 for an evaluation before the first step.
            metrics: Values by `group/name`.
        """

    def rewind(self, step: int) -> None:  # noqa: B027  (optional hook)
        """Delete metrics of steps after `step` and of evaluations at `step` or later.

        A resumed run calls this, because it logs them again.
        """

    @abstractmethod
    def close(self) -> None:
        """Flush and close."""


loggers = Registry[type[MetricLogger]].built_in("logger")
