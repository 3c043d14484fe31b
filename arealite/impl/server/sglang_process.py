"""The supervisor of one SGLang server, which is in the name registry while it answers.

`sglang` has the command line and the checks before the start.
"""

from __future__ import annotations

import asyncio
import math
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec

from arealite.api.config import ServerConfig
from arealite.base import log
from arealite.base.errors import ArealiteError, DeadlineError, UserError
from arealite.impl.launcher.processes import Child, spawn
from arealite.impl.launcher.supervisor import Budget, Died, Role, Supervisor
from arealite.impl.server.sglang_api import (
    Loads,
    ModelInfo,
    Models,
    ServerInfo,
    follow,
    note_load,
)
from arealite.system.health import vitals
from arealite.system.health.waits import Wait
from arealite.system.names.registry import NameRegistry

T = TypeVar("T")
logger = log.get(__name__)

FIRST_TOKEN = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}}
"""What makes a server ready: it has generated. Old ones tell their load and limits only then."""
POLL_S = 0.1
LOAD_S = 1.0
"""Longest a heartbeat waits for /v1/loads: the scheduler answers it, perhaps busy with weights."""
TERMINATE_S = 5.0
"""From SIGTERM to SIGKILL: a paused server with requests in it never ends by itself."""
KILL_S = 30.0
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
"""Before the restarts of a server that dies again and again."""
STEADY_S = 60.0
"""Healthy for this long, a server's next death is its first again."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How one server is started, and what its name says that never changes."""

    command: Callable[[int], list[str]]
    """Of the port."""
    environment: dict[str, str]
    port: int
    logs: Path
    about: dict[str, Any]


class SGLangProcess(Supervisor):
    """Keeps one server alive."""

    def __init__(
        self, launch: Launch, config: ServerConfig, session: aiohttp.ClientSession
    ) -> None:
        super().__init__(logger.debug)
        self.launch = launch
        self.config = config
        self.options = config.llm_server.sglang
        self.port = launch.port
        self._session = session
        self._registry = NameRegistry.of(config)
        self._entry: dict[str, Any] = {}
        name = f"llm_server-{self.entry_id}"
        budget = Budget(self.options.max_restarts, name, PAUSES_S, steady_s=math.inf)
        self.roles = [Role((name,), budget, grace_s=0.0)]
        self._times_held = 0
        """How many of its processes were healthy for STEADY_S."""
        self._changed = asyncio.Event()
        self._heard = 0.0
        """When it last told its version."""
        self._served = False
        """Whether it was ever registered: a later failure is no longer the user's."""

    @property
    def address(self) -> str:
        return f"http://{self.config.reachable_host}:{self.port}"

    @property
    def entry_id(self) -> str:
        return self.address.removeprefix("http://").replace(":", "-")

    async def run(self) -> None:
        """Keep the server alive until cancelled; then let its requests end, and end its group.

        Returns when it is given up, after `max_restarts`.

        Raises:
            UserError: it was never healthy; holds the last lines of its log.
        """
        (role,) = self.roles
        try:
            await self.keep(role)
        except Died:
            about = {"deaths": role.budget.deaths, "first": role.budget.first}
            logger.error("server given up", server=self.entry_id, **about)

    async def end(self, role: Role) -> Child | None:
        """Register the server while it answers, and wait for its end."""
        (child,) = role.children
        try:
            async with asyncio.TaskGroup() as tasks:
                serving = tasks.create_task(self._serve(child))
                dead = await role.end()
                serving.cancel()
            return dead
        except asyncio.CancelledError:
            try:
                await self._leave(child)
            finally:
                await self.clear(role)
            raise

    async def _serve(self, child: Child) -> None:
        """Keep a healthy server registered; kill one that does not answer."""
        begin = math.inf
        try:
            await self._healthy()
            begin = time.monotonic()
            async with self._registry.registered(
                "llm_server", self.entry_id, self._value, changed=self._changed,
                heartbeat_s=self.config.cluster.heartbeat_s,
            ):  # fmt: skip
                self._served = True
                self.roles[0].budget.forget()
                await self._follow()
        except (ArealiteError, OSError) as error:
            child.reason = str(error)
            child.kill()
        finally:
            self._times_held += time.monotonic() - begin > STEADY_S

    def is_needed(self, role: Role, dead: Child) -> bool:
        """Return True, after any death of a server that was healthy once.

        Raises:
            UserError: it was never healthy.
        """
        if not self._served:
            raise UserError(dead.obituary)
        return True

    def mark(self) -> float:
        return self._times_held

    async def pause(self, role: Role, dead: Child, seconds: float) -> None:
        logger.warning("server lost", error=dead.death, restart_in_s=seconds)
        await super().pause(role, dead, seconds)

    async def clear(self, role: Role) -> None:
        """Kill the server's process group; a process that stays nevertheless blocks no restart."""
        with suppress(DeadlineError), self._bounded(f"the end of {self.address}", KILL_S):
            await super().clear(role)

    def _bounded(self, what: str, seconds: float, *, replies_soon: bool = False) -> Wait:
        on = f"SGLang {self.address}"
        return Wait(what, owner="llm_server", on=on, seconds=seconds, replies_soon=replies_soon)

    async def start(self, role: Role) -> None:
        """Start the server on the port it had, if that is free.

        Raises:
            UserError: it has never served, and cannot be started.
        """
        if self.config.llm_server.port == 0:
            self.port = self._free_port()
        name = f"llm_server-{self.entry_id}"
        vitals.rename(name)
        log_file = self.launch.logs / f"{name}.log"
        words, own = self.launch.command(self.port), self.launch.environment
        try:
            self.launch.logs.mkdir(parents=True, exist_ok=True)  # again: runs are cleared away
            child = await spawn(name, words, log=log_file, environment=own, is_guarded=True)
        except (UserError, OSError):
            if not self._served:
                raise
            logger.exception("server cannot be started", server=name)
            return  # counts as one more death of the last process
        role.children = [child]
        logger.info("server starting", address=self.address, log=str(log_file))

    def _free_port(self) -> int:
        """Return the port it had, or another one if somebody took that while it was down."""
        host = self.config.llm_server.host
        try:
            return take_ports(host, self.port, 1)[0]
        except OSError:
            return take_ports(host, 0, 1)[0]

    async def _healthy(self) -> None:
        """Wait until it answers; learn what its name shall say."""
        begin, seconds = time.monotonic(), self.options.start_timeout_s
        with self._bounded(f"{self.address}/health", seconds):
            await self._answer("/health", dict)
            await self._answer("/generate", dict, FIRST_TOKEN)
            models = await self._answer("/v1/models", Models)
            more = await self._get("/server_info", ServerInfo, self.options.silence_s / 3)
            # Less than the model's: a prompt with nearly all of its answer, as it is sent again
            # after an abort, must still pass as a prompt, and SGLang keeps some tokens back.
            usable = more.max_req_input_len if more else None
            self._entry = {
                "address": self.address,
                **self.launch.about,
                "context_length": usable or models.data[0].max_model_len,
                "pid": self.children[0].pid,
            }
            # Made the first time it is asked for, which holds everything up for a second: the
            # publisher asks as soon as there is a name.
            await self._get("/openapi.json", dict, self.options.silence_s / 3)
            self._entry["version"] = await self._version()
            note_load(self._entry, await self._load(LOAD_S))
        took = round(time.monotonic() - begin, 1)
        logger.info("server ready", address=self.address, seconds=took, server=self.children[0].pid)

    async def _follow(self) -> None:
        """Keep its name fresh. Raises DeadlineError when it falls silent."""
        beat_s = self.config.cluster.heartbeat_s
        load = lambda: self._load(LOAD_S)  # noqa: E731
        await follow(
            self._entry, self._changed, version=self._version, load=load, heartbeat_s=beat_s
        )

    def _value(self) -> dict[str, Any] | None:
        """Return what its name says; None: it has been silent for so long that nobody may use it,
        although it is not started again before `silence_s`."""
        is_heard = time.monotonic() - self._heard < self.config.cluster.ttl_s
        return self._entry.copy() if is_heard else None

    async def _version(self) -> str | int | None:
        what = f"an answer of {self.address}/model_info"
        with self._bounded(what, self.options.silence_s, replies_soon=True):
            info = await self._answer("/model_info", ModelInfo)
        self._heard = time.monotonic()
        return info.weight_version

    async def _load(self, seconds: float) -> Loads | None:
        return await self._get("/v1/loads?include=core", Loads, seconds)

    async def _answer(self, path: str, kind: type[T], body: Any = None) -> T:
        """Ask until it answers."""
        seconds = self.options.silence_s / 3
        while (found := await self._get(path, kind, seconds, body)) is None:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        return found

    async def _get(self, path: str, kind: type[T], seconds: float, body: Any = None) -> T | None:
        """Return the answer, to a POST if there is a body; None if it is not one SGLang gives."""
        url, method, ask = self.address + path, "POST" if body else "GET", self._session.request
        headers = self._registry.headers()
        try:  # a total of aiohttp's would swallow a deadline around it that ends in the same moment
            with self._bounded(f"an answer of {url}", seconds):
                async with ask(method, url, json=body, headers=headers) as answer:
                    answer.raise_for_status()
                    return msgspec.json.decode(await answer.read() or b"{}", type=kind)
        except (aiohttp.ClientError, DeadlineError, OSError, msgspec.MsgspecError):
            return None

    async def _leave(self, child: Child) -> None:
        """Give running requests their time, then SIGTERM and its time.

        Only to the first process, which ends the others: where they end before it, SGLang takes
        that for a crash and stays five seconds longer.
        """
        drain_s = self.options.drain_timeout_s
        with suppress(DeadlineError), self._bounded("its last requests", drain_s):
            while (loads := await self._load(drain_s)) and (load := loads.total()):
                if not load["running"] + load["waiting"]:
                    break
                await asyncio.sleep(POLL_S)
        child.send(signal.SIGTERM)
        with suppress(DeadlineError), self._bounded("its end", TERMINATE_S):
            await child.process.wait()


def take_ports(host: str, port: int, count: int) -> list[int]:
    """Return `count` ports from `port` on, or free ones if it is 0; all were free a moment ago.

    Raises:
        OSError: one is taken, or `host` is not this machine's.
    """
    with ExitStack() as held:
        wanted = [(host, port and port + i) for i in range(count)]
        sockets = [held.enter_context(socket.create_server(address)) for address in wanted]
        return [each.getsockname()[1] for each in sockets]
