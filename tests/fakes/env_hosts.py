"""Environments that follow instructions in their task; tests and child processes import them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from arealite.api.agent import Agent
from arealite.api.env import Env, StepEnv, StepResult, envs
from arealite.api.episode import Action
from arealite.api.observation import Observation
from arealite.api.task import Task
from arealite.base.errors import EpisodeError, InvariantError, RewardTimeout, UserError

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
LEAK: list[bytearray] = []


class Unlucky(EpisodeError):
    """An error that the environment defines."""

    failure_class = "unlucky"


RAISED = {
    "unlucky": Unlucky("no luck today"),
    "check": RewardTimeout("killed"),
    "key": KeyError("lost"),
    "user": UserError("set the option"),
    "broken": InvariantError("cannot be"),
    "timeout": TimeoutError("the database"),
}
BAD: dict[str, Callable[[Agent], Any]] = {
    "block": lambda _: time.sleep(3600),
    "die": lambda _: os._exit(7),
    "leak": lambda _: LEAK.append(bytearray(b"x" * 60_000_000)),
    "nan": lambda agent: agent.reward(float("nan")),
    "nan part": lambda agent: agent.reward(1.0, length=float("nan")),
    "words": lambda agent: agent.reward("good"),
}


@envs.register("host_steps")
class Steps(StepEnv):
    """Gives a reward for each step, until an action is `end`."""

    resumable = True

    @classmethod
    def rows(cls, config: Any, *, split: str, seed: int) -> Iterator[dict[str, Any]]:
        while True:
            yield {"prompt": f"{split} {seed}"}

    async def reset(self, task: Task) -> tuple[Any, Any]:
        return {"steps": 0}, task.prompt

    async def step(self, state: Any, action: Any) -> StepResult:
        state["steps"] += 1
        last = action.text == "end" or action.is_last or state["steps"] == 50
        return StepResult(f"step {state['steps']}: {action.text}", 0.5, last)


@envs.register("host_moods")
class Moods(Env):
    """Follows the prompt after the first action; lists cancelled episodes."""

    open: ClassVar[set[str]] = set()
    cut: ClassVar[list[str]] = []

    async def run(self, task: Task, **agents: Agent) -> None:
        agent, what = agents["agent"], str(task.prompt)
        Moods.open.add(task.task_id)
        try:
            action = await agent.act(f"you said {what}")
            await self._do(what, agent, action)
        except asyncio.CancelledError:
            Moods.cut.append(task.task_id)
            raise
        finally:
            Moods.open.discard(task.task_id)

    async def _do(self, what: str, agent: Agent, action: Action) -> None:
        if what in RAISED:
            raise RAISED[what]
        if what in BAD:
            BAD[what](agent)
        match what:
            case "hang":
                await asyncio.Event().wait()
            case "pid":
                await agent.act(str(os.getpid()))
            case "long":
                await agent.act("x" * 3_000_000)
            case "odd":
                await agent.act({"not": "a text"})
            case "tools":
                action = await agent.act(Observation("call", ("a", "b"), (ADD,)))
                assert action.response is not None
                agent.reward(float(action.response.stop_reason == "length"), cut=1.0)
        agent.reward(1.0)


@envs.register("host_duel")
class Duel(Env):
    """Three rounds: both seats act at the same time, then the second answers the first."""

    seats = ("first", "second")
    resumable = True

    async def run(self, task: Task, **agents: Agent) -> None:
        first, second = agents["first"], agents["second"]
        for turn in range(3):
            seen = f"{task.prompt} round {turn}"
            a, b = await asyncio.gather(first.act(seen), second.act(seen))
            first.reward(float(len(a.text)), moved=0.1)
            first.reward(0.25, style=0.3)
            answer = await second.act(f"{seen}: {a.text}")
            second.reward(len(answer.text) - len(b.text), answered=1.0)
        first.reward(-1.0)


@envs.register("host_apart")
class Apart(Env):
    """Two seats act independently of each other; rewards come late."""

    seats = ("first", "second")

    async def run(self, task: Task, **agents: Agent) -> None:
        await asyncio.gather(self._alone(agents["first"], 2), self._alone(agents["second"], 5))

    async def _alone(self, agent: Agent, turns: int) -> None:
        for turn in range(turns):
            action = await agent.act(f"{agent.seat.name} {turn}")
            await asyncio.sleep(0.001)
            agent.reward(float(len(action.text)) + turn)


@envs.register("host_judged")
class Judged(Env):
    """An environment with configurable seats; checks which agents are trained and have acted."""

    def __init__(self, args: Any, config: Any) -> None:
        super().__init__(args, config)
        self.seats = ("player", "idle", "judge")

    async def run(self, task: Task, **agents: Agent) -> None:
        if agents["judge"].trainable or not agents["player"].trainable:
            raise UserError("the judge is trained")
        await agents["player"].act(task.prompt)
        await agents["judge"].act("judge")
        for name in ("player", "idle"):
            if agents[name].record.turns:
                agents[name].reward(1.0)
