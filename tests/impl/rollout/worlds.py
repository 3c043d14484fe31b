"""Environments and agents of the tests, registered as a user's module registers them."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np

from arealite.api.agent import Agent, agents
from arealite.api.env import Env, StepEnv, StepResult, envs
from arealite.api.episode import Action
from arealite.api.task import Task
from arealite.base.errors import InvariantError, RewardTimeout
from arealite.impl.agent.math_code_single_step import MathCodeSingleStepAgent


class Panic(BaseException):
    """An error that is not an Exception, as Rust libraries and some test frameworks raise."""


RAISED = {
    "panic": Panic("in Rust"),
    "crash": KeyError("lost"),
    "own timeout": TimeoutError("the database"),
    "check": RewardTimeout("killed"),
    "broken": InvariantError("cannot be"),
    "exit": SystemExit(0),
}


SWALLOWS = {"slow": 0, "stubborn once": 1, "stubborn": 10_000, "turned": -1}


async def slow(swallows: int) -> None:
    """Wait forever and swallow the first `swallows` cancellations; -1: raise an error instead."""
    if swallows < 0:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            raise KeyError("lost") from error
    for _ in range(swallows):
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
    if swallows != 1:
        await asyncio.Event().wait()


def _reward_first(agent: Agent, task: Task) -> None:
    """Give the rewards of a prompt that come before the usual one."""
    if task.prompt == "unscored":
        agent.reward(0.5, bonus=1.0)
        agent.reward(None)
    if task.prompt == "unscored later":
        agent.reward(None)
    if task.prompt == "changes":
        task.extra_info.setdefault("seen", []).append(1)
        agent.reward(0.0, seen=float(len(task.extra_info["seen"])))


@envs.register("world")
class World(Env):
    """An environment whose behaviour is given by the task's prompt."""

    opened = closed = 0

    async def setup(self) -> None:
        World.opened += 1

    async def close(self) -> None:
        World.closed += 1

    async def run(self, task: Task, **agents: Agent) -> None:
        agent, what = agents["agent"], task.prompt
        if what == "silent":
            return
        action = await agent.act("hello")
        if what in SWALLOWS:
            await slow(SWALLOWS[what])
        if what == "cancelled wait":
            wait = asyncio.get_running_loop().create_future()
            wait.cancel()
            await wait
        if what == "nan":
            agent.reward(float("nan"))
        if what == "nan part":
            agent.reward(1.0, length=float("nan"))
        if what == "numpy":
            agent.reward(np.float32(0.5), length=np.float64(1.0))
        if what == "infinite":
            agent.record.turns[-1].reward = float("inf")
        _reward_first(agent, task)
        if what in RAISED:
            raise RAISED[what]
        if "group" in what:
            await self._in_group(agent, is_caught=what.startswith("caught"))
        agent.reward(float(len(action.text)), length=1.0)

    async def _in_group(self, agent: Agent, *, is_caught: bool) -> None:
        with suppress(BaseExceptionGroup) if is_caught else nullcontext():
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(agent.act("a"))
                tasks.create_task(self._fail())
        await slow(0)

    async def _fail(self) -> None:
        raise RewardTimeout("killed in a group")


@envs.register("duel")
class Duel(Env):
    """Two seats act simultaneously, twice; the first seat wins."""

    seats = ("first", "second")
    resumable = True

    async def run(self, task: Task, **agents: Agent) -> None:
        moves: list[Action] = []
        for _ in range(2):
            moves += await asyncio.gather(*(agent.act(task.prompt) for agent in agents.values()))
        agents["first"].reward(1.0)
        agents["second"].reward(-1.0)


@envs.register("counter")
class Counter(StepEnv):
    """Three steps with a reward each; the observation is the whole text so far."""

    resumable = True

    async def reset(self, task: Task) -> tuple[Any, Any]:
        return {"text": task.prompt, "steps": 0}, task.prompt

    async def step(self, state: Any, action: Any) -> StepResult:
        state["steps"] += 1
        state["text"] += action.text + "!"
        return StepResult(state["text"], 0.5, state["steps"] == 3)


@envs.register("fan")
class Fan(Env):
    """Four generations at once, two of them with the same prompt, then one that joins them."""

    resumable = True
    order: tuple[int, ...] = (5, 6, 6, 7)
    """The second tokens of the concurrent prompts."""

    async def run(self, task: Task, **agents: Agent) -> None:
        agent = agents["agent"]
        asked = [agent.generate([4, token]) for token in self.order]
        answers = sorted((await asyncio.gather(*asked)), key=lambda answer: answer.output_ids)
        await agent.generate([4] + [token for each in answers for token in each.output_ids])
        agent.reward(1.0)


@agents.register("shouting")
class Shouting(MathCodeSingleStepAgent):
    """A custom agent that overrides only prompt building and parsing."""

    def build_prompt(self, observation: Any) -> str:
        return f"{observation}!"

    def parse(self, response: Any) -> str:
        return super().parse(response) * 2


@agents.register("wordless")
class Wordless(MathCodeSingleStepAgent):
    """A custom agent that returns no action."""

    answer: Any = None

    async def act(self, observation: Any) -> Any:
        return self.answer


@agents.register("judge")
class Judge(MathCodeSingleStepAgent):
    """An agent that generates and is not trained."""

    trainable = False


@envs.register("one sided")
class OneSided(Env):
    """A game that ends before the second seat's turn."""

    seats = ("first", "second")

    async def run(self, task: Task, **agents: Agent) -> None:
        await agents["first"].act(task.prompt)
        agents["first"].reward(-1.0)
