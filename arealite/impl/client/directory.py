"""Keeps the router's servers up to date with their entries in the name registry.

One owned task reads the entries for all requests, which only wait for its `changed` event. The
client asks no server: the process that supervises a server writes the server's state to its entry.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from arealite.base import log
from arealite.base.errors import InvariantError
from arealite.impl.client.routing import Router, Server
from arealite.impl.client.wire import parse_version
from arealite.system.names.registry import Entry, NameRegistry

logger = log.get(__name__)

FIRST_S = 0.02
"""Pause before the second look after `want`. It doubles from look to look, up to `refresh_s`."""


class Directory:
    """The live servers of a trial. `start` and `close` frame its one task."""

    def __init__(self, router: Router, registry: NameRegistry, *, refresh_s: float) -> None:
        self.router = router
        self.registry = registry
        self.refresh_s = refresh_s
        self.vocab_size: int | None = None
        """For servers whose name tells none: what a server is not asked may kill it."""
        self._wanted = asyncio.Event()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the registry once, then again every `refresh_s`."""
        await self.refresh()
        self._task = asyncio.create_task(self._run(), name="llm server directory")

    async def close(self) -> None:
        """Stop reading."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def want(self) -> None:
        """Ask for a refresh now, and for the next ones sooner than `refresh_s`."""
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
        """Bring the router's servers in line with the registry."""
        begin = time.monotonic()
        entries = await asyncio.to_thread(self.registry.list, "llm_server")
        servers = self.router.servers
        for entry in entries:
            self._note(entry, written=begin - entry.age_s)
        named = {entry.id for entry in entries}
        for server in [each for each in servers.values() if each.id not in named]:
            if server.alive or server.waits:
                logger.warning("llm server lost", id=server.id, address=server.address)
            server.lose()
            if not server.in_flight:
                del servers[server.id]
        self._changed.set()
        self._changed.clear()

    def _note(self, entry: Entry, *, written: float) -> None:
        """Take over what an entry says, unless it is older than what this client found itself."""
        servers, value = self.router.servers, entry.value
        server = servers.get(entry.id)
        if server is None or server.address != value["address"]:
            if server is not None:
                server.lose()
            headers = self.registry.headers(str(value.get("type")))
            server = servers[entry.id] = Server(entry.id, value["address"], headers=headers)
            logger.info("llm server found", id=entry.id, address=value["address"])
        server.vocab_size = value.get("vocab_size") or self.vocab_size
        server.context_length = value.get("context_length")
        if written > server.doubted:
            server.version = parse_version(value.get("version"))
            if not server.alive:
                logger.info("llm server in traffic", id=server.id, version=server.version)
            server.alive = True

    async def _run(self) -> None:
        pause_s = self.refresh_s
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._wanted.wait()
                pause_s = FIRST_S if self._wanted.is_set() else min(2 * pause_s, self.refresh_s)
                self._wanted.clear()
                await self.refresh()
        finally:
            self._changed.set()  # whoever waits must find out that nobody reads any more
