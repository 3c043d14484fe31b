"""Launchers bring up a run's processes, watch them, and end them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from arealite.api.config import ExperimentConfig
from arealite.base.registry import Registry


class Launcher(ABC):
    """Starts the datapipe, the rollout workers and the trainer ranks of one experiment."""

    def __init__(self, config: ExperimentConfig) -> None:
        self.config = config

    @abstractmethod
    def run(self) -> int:
        """Run the experiment to its end; return the exit code. No process it started survives
        it."""


launchers: Registry[Launcher] = Registry(
    "launcher", {"local": "arealite.impl.launcher.local:LocalLauncher"}
)
