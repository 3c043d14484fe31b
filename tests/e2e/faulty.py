"""The plugin `faulty`: an environment that misbehaves as a file requests."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from arealite.api.agent import Agent
from arealite.api.env import envs
from arealite.api.fields import opt
from arealite.api.task import Task
from arealite.ext.math.config import MathEnvConfig
from arealite.ext.math.env import MathEnv

FOR_EVER = 10_000.0


@dataclass(frozen=True, kw_only=True)
class FaultyConfig(MathEnvConfig):
    """Options of the environment: the file with requests."""

    orders: str = opt("", "a file that holds block, spin or hang; whoever reads it takes it away")


@envs.register("faulty", config=FaultyConfig)
class Faulty(MathEnv):
    """The maths environment, until the file requests a fault."""

    async def run(self, task: Task, **agents: Agent) -> None:
        order = self.order()
        if order == "block":
            time.sleep(FOR_EVER)  # noqa: ASYNC251  (the fault)
        while order == "spin":
            pass
        if order == "hang":
            await asyncio.sleep(FOR_EVER)
        await super().run(task, **agents)

    def order(self) -> str:
        """Read and remove the requested fault, if the file has one."""
        file = Path(self.config.orders)
        try:
            order = file.read_text()
            file.unlink()
        except FileNotFoundError:
            return ""
        return order
