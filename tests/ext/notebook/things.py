"""Rewards, environments and agents of a user, in a module that every process can import."""

from __future__ import annotations

import functools
from typing import Any

from arealite.api.agent import Agent, agents
from arealite.api.env import Env, envs
from arealite.api.reward import Reward
from arealite.api.task import Task
from arealite.impl.agent.math_code_single_step import MathCodeSingleStepAgent

SMALL = {
    "trainer.ppo.batch_size": 16,
    "trainer.ppo.collector.group_size": 4,
    "trainer.ppo.collector.sampling.max_new_tokens": 6,
    "trainer.ppo.eval.sampling.max_new_tokens": 6,
    "trainer.ppo.total_steps": 3,
    "launcher.drain_timeout_s": 400,
}
"""Options of a run of a few seconds."""
ROWS = [{"prompt": f"{a}+{b}=", "ground_truth": str(a + b)} for a in range(9) for b in range(8)]


def length(completion: str, ground_truth: str) -> float:
    return float(len(completion))


class Length(Reward):
    async def score(self, completion: str, ground_truth: str) -> float:
        return float(len(completion))

    def method(self, completion: str) -> float:
        return 0.0


@envs.register("python_letters")
class Letters(Env):
    """One point for each letter."""

    async def run(self, task: Task, **agents: Agent) -> None:
        points = float(len((await agents["agent"].act(task.prompt)).text))
        agents["agent"].reward(points, letters=points)


@agents.register("python_agent")
class Quiet(MathCodeSingleStepAgent):
    pass


class Unregistered(Letters):
    pass


def inner() -> Any:
    def closure(completion: str, ground_truth: str) -> float:
        return 0.0

    return closure


shout = lambda completion: 1.0  # noqa: E731
partial = functools.partial(length, ground_truth="")


def renamed(completion: str, ground_truth: str) -> float:
    return 0.0


kept, renamed = renamed, length


@envs.register("python_broken")
class Broken(Letters):
    async def run(self, task: Task, **agents: Agent) -> None:
        raise RuntimeError("no sample today")
