"""An environment that runs elsewhere: in processes of its own, or behind `arealite serve`.

The agents stay here, with their tokens; what crosses is what they see, what they do, and rewards.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec

from arealite.api.agent import Agent
from arealite.api.env import Env, envs
from arealite.api.env_config import EnvConfig
from arealite.api.env_server import Reply, SeatObservation, SeatReward, Step
from arealite.api.episode import Action
from arealite.api.observation import Observation
from arealite.api.task import Task
from arealite.base.errors import DeadlineError, UserError
from arealite.impl.env_client.channel import Channel, EnvServerGarbage
from arealite.impl.env_client.children import Children
from arealite.impl.env_client.servers import Servers
from arealite.system.health import waits

TOKEN = "AREALITE_ENV_TOKEN"
"""Environment variable with the token of this worker's own environment processes."""


class Hosted(msgspec.Struct):
    """What a server says of its environment."""

    name: str
    seats: tuple[str, ...]
    resumable: bool


decode_hosted = msgspec.json.Decoder(Hosted).decode


class RemoteEnv(Env):
    """Plays episodes in servers of an environment."""

    def __init__(self, args: Any, config: EnvConfig) -> None:
        if config.runtime.type == "subprocess" and not config.runtime.token_env:
            os.environ.setdefault(TOKEN, secrets.token_hex())
            config = replace(config, runtime=replace(config.runtime, token_env=TOKEN))
        super().__init__(args, config)
        hosted = envs.get(config.type)(args, envs.options(config))
        self.seats, self.resumable = hosted.seats, hosted.resumable
        runtime = config.runtime
        if runtime.type == "remote" and not runtime.addresses:
            raise UserError(
                "env.runtime.type=remote needs env.runtime.addresses=[host:port,…] of servers that "
                f"`arealite serve env.type={config.type}` started."
            )
        self.servers = Servers(runtime, Reply)
        self._stack = AsyncExitStack()
        self._hosted: Hosted | None = None

    async def setup(self) -> None:
        """Start the processes, or find the servers.

        Raises:
            UserError: none answers, or one hosts another environment.
        """
        runtime = self.config.runtime
        async with AsyncExitStack() as stack:
            await self.servers.start()
            stack.push_async_callback(self.servers.close)
            if runtime.type == "subprocess":
                children = Children(self.args, self.config, self.servers)
                stack.push_async_callback(children.close)
                await children.start()
            try:
                what, on = "an environment server", "environment servers"
                with waits.Wait(what, owner="collector", on=on, seconds=runtime.wait_s):
                    await self.servers.until(self._found)
            except DeadlineError as error:
                where = ", ".join(runtime.addresses) or "its own processes"
                raise UserError(
                    f"env.runtime.type={runtime.type}: no server answers at {where} in "
                    f"wait_s={runtime.wait_s}. Start them with `arealite serve`, or check "
                    "env.runtime.addresses and env.runtime.token_env."
                ) from error
            await self._ask()
            self._stack = stack.pop_all()

    async def run(self, task: Task, **agents: Agent) -> None:
        """Play an episode: the seats that wait act, side by side, until it is over."""
        untrained = [name for name, agent in agents.items() if not agent.trainable]
        reset = {"task": task, "untrained": untrained}
        async with self.servers.episode(reset) as (channel, first):
            await _Episode(channel, agents).play(first)

    async def close(self) -> None:
        """Stop what `setup` started."""
        await self._stack.aclose()

    def _found(self) -> bool:
        if self.servers.verdict is not None:
            raise self.servers.verdict
        return any(server.alive for server in self.servers.known)

    async def _ask(self) -> None:
        """Learn from the servers what they host: seats may depend on their config."""
        for server in [server for server in self.servers.known if server.alive]:
            try:
                hosted = decode_hosted(await self.servers.get(server, "metadata"))
            except (aiohttp.ClientError, OSError, EOFError, msgspec.MsgspecError) as error:
                has_key = getattr(error, "status", 0) != 401
                why = error if has_key else "it asks for another env.runtime.token_env"
                raise UserError(f"{server.name} does not say what it hosts: {why}") from error
            self._hosted = self._hosted or hosted
            if hosted != self._hosted or hosted.name != self.config.type:
                raise UserError(
                    f"{server.name} hosts environment {hosted.name} with seats {hosted.seats}; "
                    f"this run needs {self.config.type}, the same in all servers."
                )
            self.seats, self.resumable = hosted.seats, hosted.resumable


class _Episode:
    """One episode, from its first answer to its last."""

    def __init__(self, channel: Channel[Reply], agents: dict[str, Agent]) -> None:
        self.channel = channel
        self.agents = agents
        self._acting = dict[asyncio.Future[Action], SeatObservation]()
        self._begun = dict.fromkeys(agents, 0)
        self._turns = dict[tuple[str, int], int]()
        """How many turns an agent's record had when it had acted for the n-th time."""

    async def play(self, reply: Reply) -> None:
        """Go on from an answer to the end."""
        try:
            while not self._follow(reply).done:
                reply = await self.channel.ask("step", await self._next())
        finally:
            for task in self._acting:
                task.cancel()
            await asyncio.gather(*self._acting, return_exceptions=True)

    def _follow(self, reply: Reply) -> Reply:
        """Give the rewards of an answer, and let the seats act that it tells of."""
        seen = reply.observation
        try:
            for given in seen.rewards:
                self._reward(given)
            waits = [*seen.waiting, *([seen] if seen.turn else [])]
            for wait in [] if reply.done else waits:
                self._begin(wait)
        except KeyError as error:
            raise EnvServerGarbage(f"{self.channel.server.name}: no seat {error}") from error
        if not self._acting and not reply.done:
            raise EnvServerGarbage(f"{self.channel.server.name}: no seat is to act")
        return reply

    def _begin(self, wait: SeatObservation) -> None:
        if wait.turn <= self._begun[wait.seat]:
            return  # told before
        self._begun[wait.seat] = wait.turn
        extra = wait.choices or wait.tools
        seen = Observation(wait.content, wait.choices, wait.tools) if extra else wait.content
        task = asyncio.ensure_future(self.agents[wait.seat].act(seen))
        self._acting[task] = wait

    async def _next(self) -> Step:
        """Wait until a seat has acted."""
        pending = self.channel.pending
        await asyncio.wait((*self._acting, pending), return_when=asyncio.FIRST_COMPLETED)
        self.channel.check()
        task = next(task for task in self._acting if task.done())
        wait, action = self._acting.pop(task), task.result()
        self._turns[wait.seat, wait.turn] = len(self.agents[wait.seat].record.turns)
        reason = action.response.stop_reason if action.response else ""
        return Step(action.text, wait.seat, wait.turn, action.calls, action.is_last, reason)

    def _reward(self, given: SeatReward) -> None:
        """Give a reward to the turn for which it was meant: the agent may have gone on since."""
        agent, turns = self.agents[given.seat], self.agents[given.seat].record.turns
        meant = self._turns.get((given.seat, given.turn), 0)
        if not 0 < meant < len(turns):
            agent.reward(given.value, **given.parts)
            return
        agent.reward(0.0, **given.parts)
        turns[meant - 1].reward += given.value
