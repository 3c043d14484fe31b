"""The maths environment behind a gate: the plugin `gated`. A file says how far a run may go.

Who harms a run must find it under way, however long the test itself was held up.
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
from arealite.api.game_config import MathEnvConfig
from arealite.api.task import Task
from arealite.impl.env.math.env import MathEnv

FILE = Path(__file__)


@dataclass(frozen=True, kw_only=True)
class GatedConfig(MathEnvConfig):
    """Where the gate is."""

    gate: str = opt("", "a file with the number of tasks that pass; where there is none, all do")
    split: str = opt("train", "the tasks that have to pass it")


@envs.register("gated", config=GatedConfig)
class Gated(MathEnv):
    """Episodes of the first tasks are played, all others wait; one task is one group."""

    def __init__(self, args: Any, config: GatedConfig) -> None:
        super().__init__(args, config)
        self.places: dict[str, int] = {}
        """Of tasks, in the order in which they came."""

    async def run(self, task: Task, **agents: Agent) -> None:
        if task.task_id.startswith(self.config.split):
            place = self.places.setdefault(task.task_id, len(self.places))
            while place >= opened(Path(self.config.gate)):  # noqa: ASYNC110  (a file has no event)
                await asyncio.sleep(0.02)
        await super().run(task, **agents)


def opened(gate: Path) -> float:
    """Return how many tasks may pass."""
    try:
        return int(gate.read_text())
    except FileNotFoundError:
        return math.inf


def write(gate: Path, tasks: int) -> None:
    """Let so many tasks pass; whoever reads sees the old number or the new one."""
    new = gate.with_suffix(".new")
    new.write_text(str(tasks))
    new.replace(gate)
