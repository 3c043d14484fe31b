"""Keeps the router's servers up to date: from the name registry, and by asking each server itself.

One owned task does it for all requests, which only wait for its `changed` event.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import aiohttp
import msgspec

from arealite.base import log
from arealite.base.errors import DeadlineError, InvariantError
from arealite.impl.client import wire
from arealite.impl.client.routing import Router, Server
from arealite.system.health.waits import Wait
from arealite.system.names.registry import NameRegistry

logger = log.get(__name__)

MAX_MISSES = 3
"""A server that leaves this many questions in a row unanswered is lost."""


class Directory:
    """The live servers of a trial. `start` and `close` frame its one task."""

    def __init__(
        self, router: Router, registry: NameRegistry, *, refresh_s: float, timeout_s: float
    ) -> None:
        self.router = router
        self.registry = registry
        self.refresh_s = refresh_s
        self.timeout_s = timeout_s
        self.vocab_size: int | None = None
        """For servers whose name tells none: what a server is not asked may kill it."""
        self._wanted = asyncio.Event()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self, session: aiohttp.ClientSession) -> None:
        """Read the registry once, then again every `refresh_s`."""
        self._session = session
        await self.refresh()
        self._task = asyncio.create_task(self._run(), name="llm server directory")

    async def close(self) -> None:
        """Stop reading."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def want(self) -> None:
        """Ask for a refresh now rather than at the next turn."""
        self._wanted.set()

    async def changed(self) -> None:
        """Wait until the servers' state has been read again.

        Raises:
            InvariantError: nobody reads it any more.
        """
        if self._task is None or self._task.done():
            raise InvariantError("the llm client is not running, or its directory has failed")
        await self._changed.wait()

    async def refresh(self) -> None:
        """Bring the router's servers in line with the registry and with what they say."""
        entries = await asyncio.to_thread(self.registry.list, "llm_server")
        servers = self.router.servers
        for entry in entries:
            held, value = servers.get(entry.id), entry.value
            if held is None or held.address != value["address"]:
                if held is not None:
                    held.lose()
                headers = self.registry.headers(str(value.get("type")))
                held = servers[entry.id] = Server(entry.id, value["address"], headers=headers)
                logger.info("llm server found", id=entry.id, address=value["address"])
            held.vocab_size = value.get("vocab_size") or self.vocab_size
            held.context_length = value.get("context_length")
        named = {entry.id for entry in entries}
        await asyncio.gather(*(self._ask(s, s.id in named) for s in servers.values()))
        for server in list(servers.values()):
            if server.id not in named and not server.in_flight:
                del servers[server.id]
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed.clear()

    async def _run(self) -> None:
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.refresh_s):
                        await self._wanted.wait()
                self._wanted.clear()
                await self.refresh()
        finally:
            self._changed.set()  # whoever waits must find out that nobody reads any more

    async def _ask(self, server: Server, is_named: bool) -> None:
        """Ask a server for its version; a silent or refusing one gets no traffic."""
        url, seconds = f"{server.address}/model_info", self.timeout_s
        try:
            with Wait(
                "its version", owner="llm client", on=server.name, seconds=seconds, prompt=True
            ) as wait:
                wait.heard = server.heard
                async with self._session.get(url, headers=server.headers) as response:
                    response.raise_for_status()
                    info = wire.decode_model_info(await response.read())
        except DeadlineError:
            server.misses += 1
            if server.misses >= MAX_MISSES or not is_named:
                self._lose(server, f"no answer for {server.misses} x {self.timeout_s} s")
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            self._lose(server, f"{type(error).__name__}: {error}")  # its repr may show a key
        else:
            server.misses, server.heard = 0, time.monotonic()
            server.version = wire.parse_version(info.weight_version)
            if is_named and not server.alive:
                logger.info("llm server in traffic", id=server.id, version=server.version)
            server.alive = is_named
            self._tell()  # now: a silent server must not keep this one waiting

    def _lose(self, server: Server, why: str) -> None:
        if server.alive or server.waits:
            logger.warning("llm server lost", id=server.id, address=server.address, error=why)
        server.lose()
