"""The plugin `countdown`: an environment of two seats that makes its own rows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from arealite.api.agent import Agent
from arealite.api.env import Env, envs
from arealite.api.fields import opt
from arealite.api.task import Task


@dataclass(frozen=True, kw_only=True)
class CountdownConfig:
    """Options of the environment: its delay."""

    pause_s: float = opt(0.0, "after each answer")


@envs.register("countdown", config=CountdownConfig)
class Countdown(Env):
    """The reward of both seats is the share of digits in their texts."""

    seats = ("caller", "echo")

    @classmethod
    def rows(cls, config: Any, *, split: str, seed: int) -> Iterator[dict[str, Any]]:
        """Return numbers that differ between splits."""
        first = {"train": 0, "eval": 5}.get(split, 0)
        return ({"prompt": f"{first + n % 5}:"} for n in count())

    async def run(self, task: Task, **agents: Agent) -> None:
        said = task.prompt
        for agent in agents.values():
            said = (await agent.act(said or "?")).text
            await asyncio.sleep(self.config.pause_s)
            agent.reward(sum(map(str.isdigit, said)) / max(len(said), 1))
