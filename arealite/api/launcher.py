"""Launchers bring up a run's processes, bring back those that die, and end them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arealite.api.fields import opt, sub
from arealite.base.registry import Registry

if TYPE_CHECKING:
    from arealite.api.config import ExperimentConfig


@dataclass(frozen=True, kw_only=True)
class LocalLauncherConfig:
    """All roles on this machine."""

    trainer_ranks: int = opt(1, "trainer processes")
    rollout_workers: int = opt(1, "rollout processes")
    drain_timeout_s: float = opt(
        60.0, "after the first Ctrl-C: time to finish the step and checkpoint"
    )
    trainer_threads: int = opt(1, "torch threads of a trainer rank on a CPU")
    max_restarts: int = opt(
        5, "deaths of one role without a trained step in between that are healed; one more stops"
    )
    silent_s: float = opt(
        8.0, "a role that shows no sign of life for this long is killed and started again"
    )
    blocked_s: float = opt(
        60.0, "a role whose event loop is blocked for this long is killed and started again"
    )


@dataclass(frozen=True, kw_only=True)
class LauncherConfig:
    """How the run's processes are started."""

    type: str = opt("local", "name in the table of launchers")
    local: LocalLauncherConfig = sub(LocalLauncherConfig, "options of type=local")


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
