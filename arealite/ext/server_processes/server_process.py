"""The supervisor of one server program; it registers the server while the server replies.

`server_group` has the checks before the start, and starts the supervisors.
"""

import asyncio
import math
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from arealite.api.experiment_config import ServerConfig
from arealite.api.server_protocol import (
    Json,
    Load,
    ServerDescription,
    ServerProtocol,
    part_of_entry,
)
from arealite.base import log
from arealite.base.errors import ArealiteError, DeadlineError, RoleError, UserError
from arealite.ext.server_processes.config import ServerProcessOptions
from arealite.ext.server_processes.follow import (
    adapters_entry,
    describe,
    follow,
    json_object,
)
from arealite.impl.http_client import Pool
from arealite.impl.launcher.processes import GUARD, Child, spawn, take_ports
from arealite.impl.launcher.supervisor import Budget, Role, RoleFailed, Supervisor
from arealite.system.health import vitals
from arealite.system.health.waits import Wait
from arealite.system.names.name_registry import NameRegistry

logger = log.get(__name__)

POLL_S = 0.1
HEALTH_S = 1.0
"""Time without an answer about its version until a server is asked for its health."""
LOAD_S = 1.0
"""Time limit of a request for the load; a server may not reply while it loads weights."""
TERMINATE_S = 5.0
"""Seconds between SIGTERM and SIGKILL. A paused SGLang with requests never exits by itself."""
CLOSED_S = 5.0
"""Time to exit for a server that has closed its port, for example because its engine has died. An
open request can keep such a process alive."""
KILL_S = 30.0
SILENT = (DeadlineError, OSError)
"""Errors of a request to a server that does not reply."""
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
"""Pauses before the restarts of a server that dies repeatedly."""
STEADY_S = 60.0
"""After this time of health, deaths of a server are counted from 0."""


@dataclass(frozen=True, kw_only=True)
class ServerProgram:
    """A package that serves models."""

    package: str
    """Its name in Python; also the registered name of its servers, options and protocol."""
    title: str
    """Its name in messages."""
    setup_script: str
    """Script that installs it for a CPU."""
    first_requests: dict[str, Json]
    """Paths and bodies of requests that a server must answer before it is registered."""
    warm_up_paths: tuple[str, ...] = ()
    """Documents that are requested once before a server is registered."""
    restart_version: str | None = None
    """A server that reports this version is restarted: it has no usable weights."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Start parameters of one server."""

    command: Callable[[int], list[str]]
    """Returns the command line for a port."""
    environment: dict[str, str]
    port: int
    logs: Path
    metadata: dict[str, object]
    """The constant part of the name's content, with `type` and `protocol`."""
    program: ServerProgram


class ServerProcess(Supervisor):
    """Starts, registers and restarts one server."""

    def __init__(self, launch: Launch, config: ServerConfig, pool: Pool) -> None:
        super().__init__(logger.debug)
        self.launch = launch
        self.config = config
        self.options: ServerProcessOptions = config.llm_server.selected_options
        self.port = launch.port
        entry = {"address": self.address, **launch.metadata}
        self.protocol: ServerProtocol = part_of_entry("server_protocol", entry)()
        self._pool = pool
        self._registry = NameRegistry.of(config)
        self._entry: dict[str, object] = {}
        name = f"llm_server-{self.entry_id}"
        budget = Budget(
            limit=self.options.max_restarts,
            role=name,
            pauses_s=PAUSES_S,
            steady_s=math.inf,
        )
        self.roles = [Role(names=(name,), budget=budget, grace_s=0.0)]
        self._steady_runs = 0
        """Number of processes of this server that were healthy for STEADY_S."""
        self._changed = asyncio.Event()
        self._replied = 0.0
        """Monotonic time of the last reply with the server's version."""
        self._has_closed_port = False
        """Whether the last connection was refused."""
        self._served = False
        """Whether the server was ever registered; an earlier failure is an error in the config."""

    @property
    def address(self) -> str:
        return f"http://{self.config.reachable_host}:{self.port}"

    @property
    def entry_id(self) -> str:
        return self.address.removeprefix("http://").replace(":", "-")

    async def run(self) -> None:
        """Supervise the server until cancelled; then wait for its requests, and end its processes.

        Returns early if the server is given up, after `max_restarts`.

        Raises:
            UserError: the server was never healthy; the error has the last lines of its log.
        """
        (role,) = self.roles
        try:
            await self.supervise(role)
        except RoleFailed:
            logger.error(
                "server given up",
                server=self.entry_id,
                deaths=role.budget.deaths,
                first=role.budget.first,
            )

    async def end(self, role: Role) -> Child | None:
        """Register the server while it replies, and wait until it exits."""
        (child,) = role.children
        try:
            async with asyncio.TaskGroup() as tasks:
                serving = tasks.create_task(self._serve(child))
                dead = await role.end()
                serving.cancel()
            return dead
        except asyncio.CancelledError:
            try:
                await self._drain(child)
            finally:
                await self.clear(role)
            raise

    async def _serve(self, child: Child) -> None:
        """Register the server once it is healthy; kill it if it does not reply."""
        healthy_since = math.inf
        try:
            await self._healthy()
            healthy_since = time.monotonic()
            async with self._registry.registered(
                "llm_server",
                self.entry_id,
                self._value,
                changed=self._changed,
            ):
                self._served = True
                self.roles[0].budget.mark_up()
                await follow(  # raises when the server is silent, or needs a restart
                    self._entry,
                    self._changed,
                    self._version,
                    self._load,
                    heartbeat_s=self._registry.heartbeat_s,
                )
        except (ArealiteError, OSError) as error:
            if self._has_closed_port:
                await asyncio.sleep(CLOSED_S)  # cancelled when the process exits by itself
            child.reason = str(error)
            child.kill()
        finally:
            self._steady_runs += time.monotonic() - healthy_since > STEADY_S

    def is_needed(self, role: Role, dead: Child) -> bool:
        """Return True: a server that was healthy once is always restarted.

        Raises:
            UserError: the server was never healthy.
        """
        if not self._served:
            raise UserError(dead.exit_report)
        return True

    def mark(self) -> float:
        return self._steady_runs

    async def pause(self, role: Role, dead: Child, seconds: float) -> None:
        logger.warning("server lost", error=dead.exit_summary, restart_in_s=seconds)
        await super().pause(role, dead, seconds)

    async def clear(self, role: Role) -> None:
        """Kill the server's process group. A process that cannot be killed blocks no restart."""
        with suppress(DeadlineError), self._bounded(f"the end of {self.address}", KILL_S):
            await super().clear(role)

    def _bounded(self, event: str, seconds: float, *, replies_soon: bool = False) -> Wait:
        return Wait(
            event=event,
            owner="llm_server",
            on=f"{self.launch.program.title} {self.address}",
            seconds=seconds,
            replies_soon=replies_soon,
        )

    async def start(self, role: Role) -> None:
        """Start the server, on its previous port if that is free.

        Raises:
            UserError: the server never served, and cannot be started.
        """
        if self.config.llm_server.port == 0:
            self.port = self._free_port()
        name = f"llm_server-{self.entry_id}"
        vitals.rename(name)
        log_file = self.launch.logs / f"{name}.log"
        command = self.launch.command(self.port)
        try:
            # The user may have removed the run folder.
            self.launch.logs.mkdir(parents=True, exist_ok=True)
            child = await spawn(
                name,
                command,
                log=log_file,
                environment=self.launch.environment,
                guard=GUARD,
            )
        except (UserError, OSError):
            if not self._served:
                raise
            logger.exception("server cannot be started", server=name)
            return  # counted as a further death of the last process
        role.children = [child]
        logger.info("server starting", address=self.address, log=str(log_file))

    def _free_port(self) -> int:
        """Return the previous port, or another port if the previous one is in use."""
        host = self.config.llm_server.host
        with suppress(OSError):
            return take_ports(host, self.port, 1)[0]
        return take_ports(host, 0, 1)[0]

    async def _healthy(self) -> None:
        """Wait until the server replies, and compose the content of its name."""
        begin = time.monotonic()
        with self._bounded(f"{self.address}/health", self.options.start_timeout_s):
            await self._answer("/health")
            for path, body in self.launch.program.first_requests.items():
                await self._answer(path, body)
            description = await self._description()
            self._entry = {
                "address": self.address,
                **self.launch.metadata,
                "context_length": description.context_length,
                "dtype": description.dtype,
                **adapters_entry(description),
                "pid": self.children[0].pid,
            }
            for path in self.launch.program.warm_up_paths:
                await self._get(path, self._reply_s)
            self._entry["version"] = await self._version()
            self._entry["load"] = await self._load()
        logger.info(
            "server ready",
            address=self.address,
            seconds=round(time.monotonic() - begin, 1),
            server=self.children[0].pid,
        )

    def _value(self) -> dict[str, object] | None:
        """Return the content of the name; None after `ttl_s` without a reply.

        The name then dies, so no client uses the server. The server is killed after `silence_s`.
        """
        is_responsive = time.monotonic() - self._replied < self.config.cluster.ttl_s
        return self._entry.copy() if is_responsive else None

    async def _description(self) -> ServerDescription:
        """Return what the server says of itself, once it says it."""
        while True:
            description = await describe(self.protocol, self._get_json)
            if description is not None and description.context_length is not None:
                return description
            await asyncio.sleep(POLL_S)

    async def _version(self) -> str | int | None:
        """Return the version of the server's weights.

        Raises:
            DeadlineError: the server is silent.
            RoleError: the server needs a restart, or has closed its port.
        """
        path = self.protocol.version_path
        asking = asyncio.create_task(self._read_version(path), name=f"version of {self.address}")
        try:
            while not asking.done():
                with self._bounded(
                    f"an answer of {self.address}{path}",
                    self.options.silence_s,
                    replies_soon=True,
                ):
                    await self._sign_of_life(asking)
                self._replied = time.monotonic()
            version = asking.result()
        finally:
            asking.cancel()
        if version is not None and str(version) == self.launch.program.restart_version:
            raise RoleError("a failed update has broken its weights")
        return version

    async def _sign_of_life(self, asking: "asyncio.Task[str | int | None]") -> None:
        """Wait until the version is known, or a busy server answers `health_path`.

        Raises:
            RoleError: the server has closed its port.
        """
        health_path = self.protocol.health_path
        while not self._has_closed_port:
            await asyncio.wait([asking], timeout=HEALTH_S)
            if asking.done() or (
                health_path and await self._get(health_path, HEALTH_S) is not None
            ):
                return
        raise RoleError("it has closed its port, and did not exit")

    async def _read_version(self, path: str) -> str | int | None:
        """Repeat a request for the version until the server replies."""
        while True:
            answer = await self._answer(path)
            with suppress(msgspec.MsgspecError):
                return self.protocol.read_version(answer)
            await asyncio.sleep(POLL_S)

    async def _load(self, seconds: float = LOAD_S) -> Load | None:
        answer = await self._get(self.protocol.load_path, seconds)
        with suppress(msgspec.MsgspecError):
            return None if answer is None else self.protocol.read_load(answer)
        return None

    @property
    def _reply_s(self) -> float:
        """Time limit of a request that is repeated, in seconds."""
        return max(self.options.silence_s / 3, self.protocol.status_s)

    async def _answer(self, path: str, body: Json | None = None) -> bytes:
        """Repeat a request until the server replies."""
        while True:
            answer = await self._get(path, self._reply_s, body)
            if answer is not None:
                return answer
            await asyncio.sleep(POLL_S)

    async def _get_json(self, path: str) -> Json:
        """Return the JSON reply to a GET; {} without a reply in JSON.

        A server that has no time to reply is not one without the route, so the limit is long.
        """
        return json_object(await self._get(path, self.options.start_timeout_s))

    async def _get(self, path: str, seconds: float, body: Json | None = None) -> bytes | None:
        """Return the reply to a GET, or to a POST if there is a body; None without a reply."""
        url = self.address + path
        try:
            with self._bounded(f"an answer of {url}", seconds):
                status, raw = await self._pool.request(url, self._registry.headers(), body)
        except SILENT as error:
            self._has_closed_port = isinstance(error, ConnectionRefusedError)
            return None
        self._has_closed_port = False
        return raw if status < 400 else None

    async def _drain(self, child: Child) -> None:
        """Wait for running requests up to `drain_timeout_s`, then send SIGTERM and wait again.

        Only the first process receives SIGTERM; it ends the others. If others exit before it,
        SGLang reports a crash and exits five seconds later.
        """
        drain_s = self.options.drain_timeout_s
        with suppress(DeadlineError), self._bounded("its last requests", drain_s):
            while (load := await self._load(drain_s)) and load["running"] + load["waiting"]:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
        child.send(signal.SIGTERM)
        with suppress(DeadlineError), self._bounded("its end", TERMINATE_S):
            await child.process.wait()
