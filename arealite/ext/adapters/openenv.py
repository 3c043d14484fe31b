"""Adapter of OpenEnv servers: observations become text, and the agent's text becomes an action."""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.task import Row, Task
from arealite.api.trial import TrialConfig
from arealite.base.errors import UserError
from arealite.ext.adapters.config import OpenEnvConfig
from arealite.ext.hosting.client.docker import Containers
from arealite.ext.hosting.client.server_pool import ServerPool
from arealite.ext.hosting.server.env_messages import INVALID_ACTION, RemoteFailure

TEXTS = ("text", "message", "prompt", "content", "observation", "echoed_message", "output")
"""Fields of an observation that may hold its text. If the config names no fields, the first present
one of these is used."""

ECHO = {"message": "{text}"}
"""Default action: the form of OpenEnv's echo environment."""


class OpenEnvReply(msgspec.Struct, kw_only=True):
    """The data of an observation message."""

    observation: Any
    reward: bool | float | None = None
    done: bool = False


class OpenEnvEnv(Env):
    """Plays in OpenEnv servers, with one session per episode."""

    config: OpenEnvConfig
    containers: Callable[[ServerPool[OpenEnvReply]], Containers] | None = None
    """Starts the servers in containers (`runtime.type=docker`); None: they are at `addresses`."""

    def __init__(self, args: TrialConfig, config: OpenEnvConfig) -> None:
        super().__init__(args, config)
        self.servers = ServerPool(config, OpenEnvReply)

    @classmethod
    def rows(cls, config: OpenEnvConfig, *, split: str, seed: int) -> Iterator[Row]:
        """Yield rows whose `extra_info.reset` gives the server a seed."""
        rng = random.Random(f"{split}-{seed}")
        while True:
            reset = {"seed": rng.getrandbits(31)}
            yield {
                "prompt": config.instruction,
                "extra_info": {"reset": reset},
            }

    async def setup(self) -> None:
        """Start the health checks of the servers, and containers.

        Raises:
            UserError: There are no addresses, or a container does not start.
        """
        if not (self.config.addresses or self.containers):
            raise UserError(
                "env.openenv.addresses=[]: env.type=openenv needs the addresses of its servers. "
                "Set env.openenv.addresses=[host:port,…], or env.runtime.type=docker."
            )
        await self.servers.start()
        self.cleanup.push_async_callback(self.servers.close)
        if self.containers is not None:
            containers = self.containers(self.servers)
            self.cleanup.push_async_callback(containers.close)
            await containers.start()

    async def run(self, task: Task, **agents: Agent) -> None:
        """Reset with the task's `extra_info.reset`, then step until done or `max_steps`.

        The first observation follows the task's prompt.

        Raises:
            EpisodeError: The server is lost, answers with an error or violates the protocol.
        """
        agent = agents["agent"]
        config = self.config
        reset = task.extra_info.get("reset", {})
        async with self.servers.episode(reset) as (channel, reply):
            seen = self.first(task, reply.observation)
            if reply.done:
                return
            for _ in range(config.max_steps):
                action = await agent.act(seen)
                step = self.action(action.text)
                try:
                    reply = await channel.ask("step", step)
                except RemoteFailure as error:
                    if error.failure_class != INVALID_ACTION:
                        raise
                    seen = f"Not a valid action: {error}"
                else:
                    agent.reward(float(reply.reward or 0.0))
                    seen = self.text(reply.observation)
                if reply.done or action.is_last:
                    break

    def first(self, task: Task, observation: object) -> str | list[dict[str, object]]:
        """Return a task's prompt followed by the first observation."""
        content = self.text(observation)
        if isinstance(task.prompt, str):
            return f"{task.prompt}\n\n{content}"
        return [*task.prompt, {"role": "user", "content": content}]

    def text(self, observation: object) -> str:
        """Return the text of an observation for the agent."""
        if not isinstance(observation, dict):
            return _text(observation)
        names = self.config.observation or names_of_text(observation)
        if not names:
            return _text(observation)
        fields = {name: _text(observation.get(name, "")) for name in names}
        if len(names) == 1:
            return fields[names[0]]
        return "\n".join(f"{name}: {fields[name]}" for name in names)

    def action(self, completion: str) -> object:
        """Return the action for a completion, by the config's template."""
        template = self.config.action or ECHO
        return _fill(template, completion)


def names_of_text(observation: dict[str, Any]) -> list[str]:
    """Return the name of the first field in TEXTS that holds a text, [] if there is none."""
    for name in TEXTS:
        if isinstance(observation.get(name), str):
            return [name]
    return []


def _fill(template: object, completion: str) -> object:
    """Replace {text} in a template by `completion`, and {json} by its value as JSON."""
    if isinstance(template, dict):
        return {key: _fill(inner, completion) for key, inner in template.items()}
    if isinstance(template, list):
        return [_fill(inner, completion) for inner in template]
    if not isinstance(template, str):
        return template
    if template == "{json}":
        try:
            return json.loads(completion)
        except json.JSONDecodeError:
            return completion
    return template.replace("{text}", completion)


def _text(value: object) -> str:
    """Return a text unchanged, and any other value as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)
