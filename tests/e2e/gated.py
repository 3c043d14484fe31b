"""The plugin `gated`: the maths environment with a limit of tasks that a test sets in a file.

A fault must happen during a run. The limit keeps the run from ending before, on a slow machine.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arealite.api.agent import Agent
from arealite.api.env import envs
from arealite.api.fields import opt
from arealite.api.task import Task
from arealite.ext.math.config import MathEnvConfig
from arealite.ext.math.env import MathEnv

FILE = Path(__file__)


@dataclass(frozen=True, kw_only=True)
class GatedConfig(MathEnvConfig):
    """Options of the environment: the file with the number of tasks."""

    gate: str = opt("", "a file with the number of tasks that pass; where there is none, all do")
    split: str = opt("train", "the tasks that have to pass it")


@envs.register("gated", config=GatedConfig)
class Gated(MathEnv):
    """Plays the episodes of the first tasks; all others wait. One task is one group."""

    def __init__(self, args: Any, config: GatedConfig) -> None:
        super().__init__(args, config)
        self.places: dict[str, int] = {}
        """Task ids in order of arrival."""

    async def run(self, task: Task, **agents: Agent) -> None:
        if task.task_id.startswith(self.config.split):
            place = self.places.setdefault(task.task_id, len(self.places))
            while place >= opened(Path(self.config.gate)):  # noqa: ASYNC110  (a file has no event)
                await asyncio.sleep(0.02)
        await super().run(task, **agents)


def opened(gate: Path) -> float:
    """Return the number of tasks that may be played."""
    try:
        return int(gate.read_text())
    except FileNotFoundError:
        return math.inf


def write(gate: Path, tasks: int | str) -> None:
    """Set the number of tasks that may be played, atomically."""
    new = gate.with_suffix(".new")
    new.write_text(str(tasks))
    new.replace(gate)
