"""An environment that runs in child processes of the worker or behind `arealite serve`.

The agents stay in the worker, with their tokens. Observations, actions and rewards are sent.
"""

import asyncio
import os
import secrets
from dataclasses import replace

import aiohttp
import msgspec

from arealite.api.agent import Agent
from arealite.api.env import Env, envs
from arealite.api.env_config import EnvConfig
from arealite.api.env_server import Reply, SeatObservation, SeatReward, Step
from arealite.api.episode import Action
from arealite.api.observation import Observation
from arealite.api.task import Task
from arealite.api.trial import TrialConfig
from arealite.base.errors import DeadlineError, UserError
from arealite.impl.env_client.channel import Channel, EnvServerGarbage
from arealite.impl.env_client.children import Children
from arealite.impl.env_client.docker import Containers
from arealite.impl.env_client.servers import ServerPool
from arealite.system.health import waits

TOKEN = "AREALITE_ENV_TOKEN"
"""Environment variable with the token of the worker's own child processes."""
HOSTS = {"subprocess": Children, "docker": Containers}
"""The code that starts the servers of a runtime; without an entry, the user starts them."""


class Hosted(msgspec.Struct):
    """A server's description of its environment."""

    name: str
    seats: tuple[str, ...]
    resumable: bool
    environments: "list[Hosted]" = []
    """All environments of the server; [] in a description of one of them."""


decode_hosted = msgspec.json.Decoder(Hosted).decode


class RemoteEnv(Env):
    """Plays episodes in environment servers."""

    def __init__(self, args: TrialConfig, config: EnvConfig) -> None:
        if config.runtime.type == "subprocess" and not config.runtime.token_env:
            os.environ.setdefault(TOKEN, secrets.token_hex())
            config = replace(config, runtime=replace(config.runtime, token_env=TOKEN))
        super().__init__(args, config)
        hosted = envs.get(config.type)(args, envs.options(config))
        self.seats = hosted.seats
        self.resumable = hosted.resumable
        runtime = config.runtime
        if runtime.type == "remote" and not runtime.addresses:
            what = "env.runtime.type=remote needs env.runtime.addresses=[host:port,…]"
            fix = f"the addresses of servers that `arealite serve env.type={config.type}` started"
            raise UserError(f"{what}: {fix}.")
        self.servers = ServerPool(runtime, Reply)
        self._hosted: Hosted | None = None

    async def setup(self) -> None:
        """Start the child processes or find the servers, and read which seats they host.

        Raises:
            UserError: No server answers, or a server hosts another environment.
        """
        runtime = self.config.runtime
        await self.servers.start()
        self.cleanup.push_async_callback(self.servers.close)
        if runtime.type in HOSTS:
            children = HOSTS[runtime.type](self.args, self.config, self.servers)
            self.cleanup.push_async_callback(children.close)
            await children.start()
        try:
            what = "an environment server"
            on = "environment servers"
            with waits.Wait(what, owner="collector", on=on, seconds=runtime.wait_s):
                await self.servers.wait_until(self._is_any_alive)
        except DeadlineError as error:
            where = ", ".join(runtime.addresses) or "the worker's child processes"
            what = f"no server answers at {where} in wait_s={runtime.wait_s}"
            fix = "Start the servers with `arealite serve`, or check env.runtime.addresses and"
            what = f"env.runtime.type={runtime.type}: {what}. {fix} env.runtime.token_env."
            raise UserError(what) from error
        await self._read_metadata()

    async def run(self, task: Task, **agents: Agent) -> None:
        """Play an episode on a server; seats that wait at the same time act concurrently."""
        untrained = [name for name, agent in agents.items() if not agent.trainable]
        reset = {"task": task, "untrained": untrained, "env": self.config.type}
        async with self.servers.episode(reset) as (channel, first):
            await _Episode(channel, agents).play(first)

    def _is_any_alive(self) -> bool:
        if self.servers.fatal is not None:
            raise self.servers.fatal
        return any(server.alive for server in self.servers.known)

    async def _read_metadata(self) -> None:
        """Read seats and resumability from the servers: both may depend on the server's config."""
        for server in [server for server in self.servers.known if server.alive]:
            try:
                default = decode_hosted(await self.servers.get(server, "metadata"))
            except (aiohttp.ClientError, OSError, EOFError, msgspec.MsgspecError) as error:
                what = f"{server.name} does not describe its environment at /metadata"
                is_unauthorized = getattr(error, "status", 0) == 401
                fix = "it needs another token; set env.runtime.token_env"
                raise UserError(f"{what}: {fix if is_unauthorized else error}") from error
            named = {each.name: each for each in default.environments}
            hosted = named.get(self.config.type, default)
            self._hosted = self._hosted or hosted
            if hosted != self._hosted or hosted.name != self.config.type:
                found = f"{', '.join(named) or hosted.name} with seats {hosted.seats}"
                fix = f"This run needs {self.config.type}, with the same seats in all servers."
                raise UserError(f"{server.name} hosts environment {found}. {fix}")
            self.seats = hosted.seats
            self.resumable = hosted.resumable


class _Episode:
    """One episode of a session."""

    def __init__(self, channel: Channel[Reply], agents: dict[str, Agent]) -> None:
        self.channel = channel
        self.agents = agents
        self._acting = dict[asyncio.Future[Action], SeatObservation]()
        self._latest = dict.fromkeys(agents, 0)
        """Number of each seat's latest turn."""
        self._record_lengths = dict[tuple[str, int], int]()
        """By seat and turn number: how many turns the agent's record had after that turn."""

    async def play(self, reply: Reply) -> None:
        """Play from the answer to the reset until the episode is done."""
        try:
            while not self._handle(reply).done:
                reply = await self.channel.ask("step", await self._next_step())
        finally:
            await waits.cancel_all(self._acting)

    def _handle(self, reply: Reply) -> Reply:
        """Pass the rewards of an answer to the agents; start `act` of seats that newly wait."""
        view = reply.observation
        try:
            for given in view.rewards:
                self._reward(given)
            for wait in [] if reply.done else [*view.waiting, *([view] if view.turn else [])]:
                self._start(wait)
        except KeyError as error:
            raise EnvServerGarbage(f"{self.channel.server.name}: no seat {error}") from error
        if not self._acting and not reply.done:
            raise EnvServerGarbage(f"{self.channel.server.name}: no seat waits for a step")
        return reply

    def _start(self, wait: SeatObservation) -> None:
        if wait.turn <= self._latest[wait.seat]:
            return  # an earlier answer held this wait
        self._latest[wait.seat] = wait.turn
        extra = wait.choices or wait.tools
        seen = Observation(wait.content, wait.choices, wait.tools) if extra else wait.content
        self._acting[asyncio.ensure_future(self.agents[wait.seat].act(seen))] = wait

    async def _next_step(self) -> Step:
        """Wait until an agent has acted; return its step."""
        pending = self.channel.pending
        await asyncio.wait((*self._acting, pending), return_when=asyncio.FIRST_COMPLETED)
        self.channel.check()
        task = next(task for task in self._acting if task.done())
        wait = self._acting.pop(task)
        action = task.result()
        self._record_lengths[wait.seat, wait.turn] = len(self.agents[wait.seat].record.turns)
        reason = action.response.stop_reason if action.response else ""
        return Step(action.text, wait.seat, wait.turn, action.calls, action.is_last, reason)

    def _reward(self, given: SeatReward) -> None:
        """Add a reward to the turn it was given for; the agent may have acted since."""
        agent = self.agents[given.seat]
        turns = self.agents[given.seat].record.turns
        length = self._record_lengths.get((given.seat, given.turn), 0)
        if given.value is None or not 0 < length < len(turns):
            agent.reward(given.value, **given.parts)
            return
        agent.reward(0.0, **given.parts)
        turns[length - 1].reward += given.value
