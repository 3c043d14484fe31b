"""One SGLang server process: started, registered while it answers, started again when it dies.

Apart from the command line and the checks, because what happens to a process is the hard half.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec

from arealite.api.config import ServerConfig
from arealite.base import log
from arealite.base.errors import ArealiteError, DeadlineError, RoleError, UserError
from arealite.impl.launcher.processes import how_ended
from arealite.impl.launcher.supervisor import Budget
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

GUARD = """
exec 3<&0 </dev/null
(trap '' HUP INT TERM; read -r _ <&3; kill -9 0) &
exec "$@" 3<&-
"""
"""Run by sh in the server's process group: when our end of the pipe closes, however we died, the
whole group is killed, grandchildren included, which a death signal from the kernel would miss."""

FIRST_TOKEN = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}}
"""What makes a server ready: it has generated. Old ones tell their load and limits only then."""
POLL_S = 0.1
LOAD_S = 1.0
"""Longest a heartbeat waits for /v1/loads: the scheduler answers it, perhaps busy with weights."""
TERMINATE_S = 5.0
"""From SIGTERM to SIGKILL: a paused server with requests in it never ends by itself."""
KILL_S = 30.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
STEADY_S = 60.0
"""Healthy for this long, a server's next death is its first again."""
TAIL_LINES = 25


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How one server is started, and what its name says that never changes."""

    command: Callable[[int], list[str]]
    """Of the port."""
    environment: dict[str, str]
    port: int
    logs: Path
    about: dict[str, Any]


class SGLangProcess:
    """Keeps one server alive."""

    def __init__(
        self, launch: Launch, config: ServerConfig, session: aiohttp.ClientSession
    ) -> None:
        self.launch = launch
        self.config = config
        self.options = config.llm_server.sglang
        self.port = launch.port
        self.log: Path
        self._session = session
        self._registry = NameRegistry.of(config)
        self._process: Process
        self._log_begin = 0
        self._entry: dict[str, Any] = {}
        self._changed = asyncio.Event()
        self._heard = 0.0
        """When it last told its version."""
        self._healthy_at: float | None = None
        self._budget = Budget(self.options.max_restarts, f"llm_server-{self.entry_id}")
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
        budget, times_held, pause_s = self._budget, 0, FIRST_PAUSE_S
        budget.expect("start")
        while True:
            self._healthy_at = None
            try:
                await self._live()
            except (ArealiteError, OSError) as error:
                if not self._served:
                    if isinstance(error, UserError):
                        raise
                    what = f"{error}. Its last lines ({self.log}):\n{self.tail()}"
                    raise UserError(what) from error
                if self._healthy_at and time.monotonic() - self._healthy_at > STEADY_S:
                    pause_s, times_held = FIRST_PAUSE_S, times_held + 1
                said = f"{error}\n{self.tail()}"
                if budget.spend(said, mark=times_held, lived_s=0.0) is None:
                    about = {"deaths": budget.deaths, "first": budget.first}
                    logger.error("server given up", server=self.entry_id, **about)
                    return
                logger.warning("server lost", error=str(error), restart_in_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _live(self) -> None:
        """Start the process and stay with it to its end, which is always an error."""
        try:
            await completed(self._start())
        except asyncio.CancelledError:
            await self._end()
            raise
        try:
            await self._until_exit(self._healthy())
            async with self._registry.registered(
                "llm_server", self.entry_id, self._value, changed=self._changed,
                heartbeat_s=self.config.cluster.heartbeat_s,
            ):  # fmt: skip
                self._served = True
                self._budget.forget()
                await self._until_exit(self._follow())
        except asyncio.CancelledError:
            await self._leave()
            raise
        finally:
            await completed(self._end())

    async def _end(self) -> None:
        with suppress(ProcessLookupError):  # what is left of the group: the guard at least,
            os.killpg(self._process.pid, signal.SIGKILL)  # so this id is nobody else's
        with self._bounded(f"the end of {self.address}", KILL_S):
            await self._process.wait()

    def _bounded(self, what: str, seconds: float, *, prompt: bool = False) -> Wait:
        on = f"SGLang {self.address}"
        return Wait(what, owner="llm_server", on=on, seconds=seconds, prompt=prompt)

    async def _start(self) -> None:
        if self.config.llm_server.port == 0:
            self.port = self._free_port()
        vitals.rename(f"llm_server-{self.entry_id}")
        self.log = self.launch.logs / f"llm_server-{self.entry_id}.log"
        self.launch.logs.mkdir(parents=True, exist_ok=True)  # again: runs are cleared away
        with self.log.open("ab") as output:
            self._log_begin = output.tell()
            self._process = await asyncio.create_subprocess_exec(
                "/bin/sh",
                "-c",
                GUARD,
                "sh",
                *self.launch.command(self.port),
                env=self.launch.environment,
                stdin=PIPE,  # held open, never written to: see GUARD
                stdout=output,
                stderr=STDOUT,
                start_new_session=True,
            )
        logger.info("server starting", address=self.address, log=str(self.log))

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
                "pid": self._process.pid,
            }
            # Made the first time it is asked for, which holds everything up for a second: the
            # publisher asks as soon as there is a name.
            await self._get("/openapi.json", dict, self.options.silence_s / 3)
            self._entry["version"] = await self._version()
            note_load(self._entry, await self._load(LOAD_S))
        self._healthy_at = time.monotonic()
        took = round(self._healthy_at - begin, 1)
        logger.info("server ready", address=self.address, seconds=took, server=self._process.pid)

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
        with self._bounded(what, self.options.silence_s, prompt=True):
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

    async def _until_exit(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, but no longer than the process lives."""
        job = asyncio.ensure_future(work)
        exit_ = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait((job, exit_), return_when=asyncio.FIRST_COMPLETED)
            if exit_.done():
                raise RoleError(f"llm_server {self.address} died ({how_ended(exit_.result())})")
            return job.result()
        finally:
            job.cancel()
            exit_.cancel()
            await asyncio.gather(job, exit_, return_exceptions=True)

    async def _leave(self) -> None:
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
        with suppress(ProcessLookupError):
            self._process.terminate()
        with suppress(DeadlineError), self._bounded("its end", TERMINATE_S):
            await self._process.wait()

    def tail(self) -> str:
        """Return the last lines that this start of the server wrote."""
        with self.log.open("rb") as file:
            file.seek(self._log_begin)
            lines = file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join(f"    {line}" for line in lines) or "    (empty: is the disk full?)"


async def completed(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to its end also where the caller is cancelled meanwhile: a process half started
    leaks its pipe, and one not waited for stays a zombie."""
    job = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        await asyncio.wait((job,))
        raise


def take_ports(host: str, port: int, count: int) -> list[int]:
    """Return `count` ports from `port` on, or free ones if it is 0; all were free a moment ago.

    Raises:
        OSError: one is taken, or `host` is not this machine's.
    """
    with ExitStack() as held:
        wanted = [(host, port and port + i) for i in range(count)]
        sockets = [held.enter_context(socket.create_server(address)) for address in wanted]
        return [each.getsockname()[1] for each in sockets]
