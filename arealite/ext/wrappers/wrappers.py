"""Wrappers change observations, rewards and the length of episodes, or record them.

A wrapper stands between an environment and the agent of a seat. So it works in training (`wrap`)
and for Requests (`make(name, wrappers=[…])`).
"""

from collections.abc import Callable, Coroutine, Sequence
from copy import copy
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, cast

import msgspec

from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.episode import Action
from arealite.api.observation import Observation, observe
from arealite.api.task import Task
from arealite.base.errors import UserError

RunEpisode = Callable[..., Coroutine[Any, Any, None]]


class Wrapper:
    """Base class. Override `act` and `reward`; other attributes are those of the agent.

    Each seat of each episode has a copy of its own.
    """

    agent: Any = None
    """The agent of the seat, or the next wrapper."""

    def __call__(self, agent: Any) -> Any:
        """Return a copy for the seat of an agent."""
        seat_wrapper = copy(self)
        seat_wrapper.agent = agent
        return seat_wrapper

    def __getattr__(self, name: str) -> Any:
        return getattr(self.agent, name)


class TimeIsUp(Exception):
    """A TimeLimit ends the episode."""


class TimeLimit(Wrapper):
    """Ends the episode when an actor must act after `turns` actions. Rewards given before stay."""

    def __init__(self, turns: int) -> None:
        if turns < 1:
            raise UserError(f"TimeLimit({turns}): an episode needs at least one action.")
        self.turns = turns
        self.taken = 0

    async def act(self, observation: object) -> Action:
        """Return the agent's action; raise TimeIsUp after the last one."""
        if self.taken == self.turns:
            raise TimeIsUp
        self.taken += 1
        return await self.agent.act(observation)


class ScaleReward(Wrapper):
    """Multiplies rewards by `scale` and clips them to [-clip, clip]; each action adds `bias`."""

    def __init__(
        self,
        scale: float = 1.0,
        *,
        clip: float = inf,
        bias: float = 0.0,
    ) -> None:
        self.scale = scale
        self.clip = clip
        self.bias = bias

    async def act(self, observation: object) -> Action:
        """Return the agent's action, and reward it with the bias."""
        action = await self.agent.act(observation)
        if self.bias:
            self.agent.reward(self.bias)
        return action

    def reward(self, value: float | None, /, **parts: float) -> None:
        """Give the agent the scaled reward; parts are unchanged."""
        if value is not None:
            scaled = value * self.scale
            at_least = max(scaled, -self.clip)
            value = min(at_least, self.clip)
        self.agent.reward(value, **parts)


class TransformObservation(Wrapper):
    """Replaces each Observation by `function(observation)`: an Observation, text or messages."""

    def __init__(self, function: Callable[[Observation], object]) -> None:
        self.function = function

    async def act(self, observation: object) -> Action:
        """Show the agent the new observation; choices and tools stay if it is a text."""
        original = observe(observation)
        transformed = self.function(original)
        has_attributes = original.choices or original.tools
        if has_attributes and isinstance(transformed, str | list):
            transformed = msgspec.structs.replace(original, content=transformed)
        return await self.agent.act(transformed)


class Record(Wrapper):
    """Adds every event to a list, or as a line to a JSONL file.

    An event is `{"episode": …, "actor": …, "observation" or "action" or "reward": …}`.
    """

    def __init__(self, to: list[dict[str, Any]] | str | Path) -> None:
        self.to = to

    async def act(self, observation: object) -> Action:
        """Record observation and action."""
        content = observe(observation).content
        self._add("observation", content)
        action = await self.agent.act(observation)
        self._add("action", action.text)
        return action

    def reward(self, value: float | None, /, **parts: float) -> None:
        """Record the reward."""
        self._add("reward", value)
        self.agent.reward(value, **parts)

    def _add(self, kind: str, value: object) -> None:
        seat = self.agent.seat
        event = {
            "episode": seat.episode_id,
            "actor": seat.name,
            kind: value,
        }
        if isinstance(self.to, list):
            self.to.append(event)
            return
        line = msgspec.json.encode(event) + b"\n"
        with open(self.to, "ab") as file:
            file.write(line)


def wrapped(run: RunEpisode, wrappers: Sequence[Wrapper]) -> RunEpisode:
    """Return `Env.run` with wrappers; the first one is next to the agent."""

    async def run_wrapped(task: Task, **agents: Agent) -> None:
        wrapped_agents = agents
        for wrapper in wrappers:
            wrapped_agents = {seat: wrapper(agent) for seat, agent in wrapped_agents.items()}
        try:
            await run(task, **wrapped_agents)
        except* TimeIsUp:
            for agent in agents.values():
                if agent.record.turns:
                    agent.reward(0.0, truncated=1.0)

    return run_wrapped


def wrap(base: type[Env], *wrappers: Wrapper) -> type[Env]:
    """Return a class of environments with wrappers, to register under a name of its own.

    Args:
        base: The class to extend. The options are those of this class.
        wrappers: The wrappers; the first one is next to the agent.
    """

    async def run(self: Env, task: Task, **agents: Agent) -> None:
        base_run = partial(base.run, self)
        run_wrapped = wrapped(base_run, wrappers)
        await run_wrapped(task, **agents)

    metaclass = cast(Any, type(base))
    attributes = {"run": run, "__doc__": base.__doc__}
    return metaclass(base.__name__, (base,), attributes)
