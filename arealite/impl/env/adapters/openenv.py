"""Any OpenEnv server as an environment: observations become text, the agent's text an action."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from arealite.api.adapter_config import OpenEnvConfig
from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.task import Task
from arealite.base.errors import UserError
from arealite.impl.env_client.servers import ServerPool
from arealite.impl.env_server.wire import INVALID_ACTION, RemoteFailure

TEXTS = ("text", "message", "prompt", "content", "observation", "echoed_message", "output")
"""Fields that hold what there is to read, where the config names none; the first one counts."""

ECHO = {"message": "{text}"}
"""The action that OpenEnv's echo environment takes."""


class OpenEnvReply(msgspec.Struct):
    """The data of an observation."""

    observation: Any
    reward: bool | float | None = None
    done: bool = False


class OpenEnvEnv(Env):
    """Plays in OpenEnv servers, one session an episode."""

    config: OpenEnvConfig

    def __init__(self, args: Any, config: OpenEnvConfig) -> None:
        super().__init__(args, config)
        self.servers = ServerPool(config, OpenEnvReply)
        self._stack = AsyncExitStack()

    @classmethod
    def rows(cls, config: OpenEnvConfig, *, split: str, seed: int) -> Iterator[dict[str, Any]]:
        """Yield rows whose `extra_info.reset` gives the server a seed."""
        dice = random.Random(f"{split}-{seed}")
        while True:
            reset = {"seed": dice.getrandbits(31)}
            yield {"prompt": config.instruction, "extra_info": {"reset": reset}}

    async def setup(self) -> None:
        """Begin to look for the servers.

        Raises:
            UserError: there are no addresses.
        """
        if not self.config.addresses:
            raise UserError("env.type=openenv needs env.openenv.addresses=[host:port,…].")
        await self.servers.start()
        self._stack.push_async_callback(self.servers.close)

    async def run(self, task: Task, **agents: Agent) -> None:
        """Reset with the task's `extra_info.reset`, and step until done or `max_steps`. The first
        observation comes after the task's prompt.

        Raises:
            EpisodeError: the server is lost, fails, or does not keep to the protocol.
        """
        agent, config = agents["agent"], self.config
        async with self.servers.episode(task.extra_info.get("reset", {})) as (channel, reply):
            seen: Any = self.first(task, reply.observation)
            for _ in range(0 if reply.done else config.max_steps):
                action = await agent.act(seen)
                try:
                    reply = await channel.ask("step", self.action(action.text))
                except RemoteFailure as error:
                    if error.failure_class != INVALID_ACTION:
                        raise
                    seen = f"Not a valid action: {error}"
                else:
                    agent.reward(float(reply.reward or 0.0))
                    seen = self.text(reply.observation)
                if reply.done or action.is_last:
                    break

    async def close(self) -> None:
        """Leave the servers alone."""
        await self._stack.aclose()

    def first(self, task: Task, observation: Any) -> Any:
        """Return a task's prompt with the first observation after it."""
        text = self.text(observation)
        if isinstance(task.prompt, str):
            return f"{task.prompt}\n\n{text}"
        return [*task.prompt, {"role": "user", "content": text}]

    def text(self, observation: Any) -> str:
        """Return what the agent reads of an observation."""
        names = self.config.observation
        if not isinstance(observation, dict):
            return _text(observation)
        if not names:
            names = [name for name in TEXTS if isinstance(observation.get(name), str)][:1]
        if len(names) == 1:
            return _text(observation.get(names[0], ""))
        if not names:
            return _text(observation)
        return "\n".join(f"{name}: {_text(observation.get(name, ''))}" for name in names)

    def action(self, text: str) -> Any:
        """Return the action that a completion means."""
        return _fill(self.config.action or ECHO, text)


def _fill(template: Any, text: str) -> Any:
    """Put a text where a template has {text}, and what it says as JSON where it has {json}."""
    if isinstance(template, dict):
        return {key: _fill(value, text) for key, value in template.items()}
    if isinstance(template, list):
        return [_fill(value, text) for value in template]
    if template == "{json}":
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text
    return template.replace("{text}", text) if isinstance(template, str) else template


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
