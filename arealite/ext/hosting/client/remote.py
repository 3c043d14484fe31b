"""An environment that runs in child processes of the worker or behind `arealite serve`.

The agents stay in the worker, with their tokens. Observations, actions and rewards are sent.
"""

import asyncio
import os
import secrets
from dataclasses import replace
from functools import partial

import aiohttp
import msgspec

from arealite.api.agent import Agent
from arealite.api.env import Env, EnvConfig, envs
from arealite.api.episode import Action
from arealite.api.observation import Observation
from arealite.api.task import Task
from arealite.api.trial import TrialConfig
from arealite.base.errors import DeadlineError, UserError
from arealite.ext.hosting.client.child_servers import Children
from arealite.ext.hosting.client.docker import Containers, check_docker
from arealite.ext.hosting.client.server_pool import ServerPool
from arealite.ext.hosting.client.session_channel import (
    EnvServerGarbage,
    ServerState,
    SessionChannel,
)
from arealite.ext.hosting.server_config import SeatObservation, SeatReward, Step, StepReply
from arealite.system.health import waits

TOKEN = "AREALITE_ENV_TOKEN"
"""Environment variable with the token of the worker's own child processes."""
HOSTS = {"subprocess": Children, "docker": Containers}
"""The code that starts the servers of a runtime; without an entry, the user starts them."""


class Hosted(msgspec.Struct, kw_only=True):
    """A server's description of its environment."""

    name: str
    seats: tuple[str, ...]
    resumable: bool
    environments: "list[Hosted]" = []
    """All environments of the server; [] in a description of one of them."""


def in_containers(args: TrialConfig, config: EnvConfig) -> Env:
    """Create an environment in Docker containers.

    Raises:
        UserError: Docker does not run, or lacks the image.
    """
    check_docker(config.runtime)
    env_class = envs.get(config.type)
    if not hasattr(env_class, "containers"):
        return RemoteEnv(args, config)
    env = env_class(args, envs.options(config))  # it talks to the servers itself
    setattr(env, "containers", partial(Containers, args, config))  # noqa: B010
    return env


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
            raise UserError(
                "env.runtime.type=remote needs env.runtime.addresses=[host:port,…]: "
                f"the addresses of servers that `arealite serve env.type={config.type}` started."
            )
        self.servers = ServerPool(runtime, StepReply)

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
        wait = waits.Wait(
            event="an environment server",
            owner="collector",
            on="environment servers",
            seconds=runtime.wait_s,
        )
        try:
            with wait:
                await self.servers.wait_until(self._is_any_alive)
        except DeadlineError as error:
            addresses = ", ".join(runtime.addresses) or "the worker's child processes"
            raise UserError(
                f"env.runtime.type={runtime.type}: "
                f"no server answers at {addresses} in wait_s={runtime.wait_s}. "
                "Start the servers with `arealite serve`, or check env.runtime.addresses and "
                "env.runtime.token_env."
            ) from error
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
        living = [server for server in self.servers.known if server.alive]
        expected: Hosted | None = None
        for server in living:
            default = await self._describe(server)
            by_name = {hosted.name: hosted for hosted in default.environments}
            hosted = by_name.get(self.config.type, default)
            expected = expected or hosted
            if hosted != expected or hosted.name != self.config.type:
                names = ", ".join(by_name) or hosted.name
                raise UserError(
                    f"{server.name} hosts environment {names} with seats {hosted.seats}. "
                    f"This run needs {self.config.type}, with the same seats in all servers."
                )
            self.seats = hosted.seats
            self.resumable = hosted.resumable

    async def _describe(self, server: ServerState) -> Hosted:
        """Return a server's description of its default environment.

        Raises:
            UserError: The server does not describe its environment.
        """
        try:
            return decode_hosted(await self.servers.get(server, "metadata"))
        except (aiohttp.ClientError, OSError, EOFError, msgspec.MsgspecError) as error:
            is_unauthorized = getattr(error, "status", 0) == 401
            token_hint = "it needs another token; set env.runtime.token_env"
            raise UserError(
                f"{server.name} does not describe its environment at /metadata: "
                f"{token_hint if is_unauthorized else error}"
            ) from error


class _Episode:
    """One episode of a session."""

    def __init__(self, channel: SessionChannel[StepReply], agents: dict[str, Agent]) -> None:
        self.channel = channel
        self.agents = agents
        self._acting = dict[asyncio.Future[Action], SeatObservation]()
        self._latest = dict.fromkeys(agents, 0)
        """Number of each seat's latest turn."""
        self._record_lengths = dict[tuple[str, int], int]()
        """By seat and turn number: how many turns the agent's record had after that turn."""

    async def play(self, reply: StepReply) -> None:
        """Play from the answer to the reset until the episode is done."""
        try:
            self._handle(reply)
            while not reply.done:
                step = await self._next_step()
                reply = await self.channel.ask("step", step)
                self._handle(reply)
        finally:
            await waits.cancel_all(self._acting)

    def _handle(self, reply: StepReply) -> None:
        """Pass the rewards of an answer to the agents; start `act` of seats that newly wait."""
        observation = reply.observation
        try:
            for reward in observation.rewards:
                self._reward(reward)
            if not reply.done:
                for wait in observation.waiting:
                    self._start(wait)
                if observation.turn:  # the observation of the only seat
                    self._start(observation)
        except KeyError as error:
            raise EnvServerGarbage(f"{self.channel.server.name}: no seat {error}") from error
        if not self._acting and not reply.done:
            raise EnvServerGarbage(f"{self.channel.server.name}: no seat waits for a step")

    def _start(self, wait: SeatObservation) -> None:
        if wait.turn <= self._latest[wait.seat]:
            return  # an earlier answer held this wait
        self._latest[wait.seat] = wait.turn
        observation: object = wait.content
        if wait.choices or wait.tools:
            observation = Observation(wait.content, wait.choices, wait.tools)
        task = asyncio.ensure_future(self.agents[wait.seat].act(observation))
        self._acting[task] = wait

    async def _next_step(self) -> Step:
        """Wait until an agent has acted; return its step."""
        pending = self.channel.pending
        await asyncio.wait((*self._acting, pending), return_when=asyncio.FIRST_COMPLETED)
        self.channel.check()
        task = next(task for task in self._acting if task.done())
        wait = self._acting.pop(task)
        action = task.result()
        self._record_lengths[wait.seat, wait.turn] = len(self.agents[wait.seat].record.turns)
        return Step(
            text=action.text,
            seat=wait.seat,
            turn=wait.turn,
            calls=action.calls,
            is_last=action.is_last,
            stop_reason=action.response.stop_reason if action.response else "",
        )

    def _reward(self, reward: SeatReward) -> None:
        """Add a reward to the turn it was given for; the agent may have acted since."""
        agent = self.agents[reward.seat]
        turns = agent.record.turns
        record_length = self._record_lengths.get((reward.seat, reward.turn), 0)
        has_acted_since = 0 < record_length < len(turns)
        if reward.value is None or not has_acted_since:
            agent.reward(reward.value, **reward.parts)
            return
        agent.reward(0.0, **reward.parts)
        turns[record_length - 1].reward += reward.value
