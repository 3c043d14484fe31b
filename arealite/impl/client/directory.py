"""Updates the router's servers from their entries in the name registry.

One task reads the entries for all requests; a request waits for its `changed` event. The client
never polls a server: the process that supervises a server writes the server's state to its entry.
"""

import asyncio
import time
from contextlib import suppress

from arealite.api.server_protocol import part_of_entry
from arealite.base import log
from arealite.base.errors import InvariantError
from arealite.impl.client.answer_checks import parse_version
from arealite.impl.client.server_choice import LLMServerState, Router
from arealite.system.names.name_registry import Entry, NameRegistry

logger = log.get(__name__)

FIRST_S = 0.02
"""Pause before the second read after `request_refresh`. It doubles with each read, up to
`refresh_s`."""


class Directory:
    """Reads the live servers of a trial in one task, which `start` begins and `close` ends."""

    def __init__(self, router: Router, registry: NameRegistry, *, refresh_s: float) -> None:
        self.router = router
        self.registry = registry
        self.refresh_s = refresh_s
        self.vocab_size: int | None = None
        """Vocabulary size of servers without one in their entry. A token id beyond it could crash a
        server."""
        self._refresh_requested = asyncio.Event()
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

    def request_refresh(self) -> None:
        """Request a refresh now, and shorter pauses before the next ones."""
        self._refresh_requested.set()

    async def changed(self) -> None:
        """Wait until the servers' state has been read again.

        Raises:
            InvariantError: the task is not running.
        """
        if self._task is None or self._task.done():
            raise InvariantError("the llm client is not running, or its directory has failed")
        await self._changed.wait()

    async def refresh(self) -> None:
        """Update the router's servers from the registry."""
        begin = time.monotonic()
        entries = await asyncio.to_thread(self.registry.list, "llm_server")
        servers = self.router.servers
        for entry in entries:
            self._read_entry(entry, written=begin - entry.age_s)
        registered_ids = {entry.id for entry in entries}
        for server in list(servers.values()):
            if server.id in registered_ids:
                continue
            if server.alive or server.waits:
                logger.warning("llm server lost", id=server.id, address=server.address)
            server.remove_from_traffic()
            if not server.in_flight:
                del servers[server.id]
        self._changed.set()
        self._changed.clear()

    def _read_entry(self, entry: Entry, *, written: float) -> None:
        """Update a server from its entry, unless the entry is older than a failure seen here."""
        server = self.router.servers.get(entry.id)
        if server is None or server.address != entry.value["address"]:
            if server is not None:
                server.remove_from_traffic()
            server = self._add_server(entry)
        server.vocab_size = entry.value.get("vocab_size") or self.vocab_size
        server.context_length = entry.value.get("context_length")
        if written > server.entry_stale_since:
            server.set_label(entry.value.get("version"))
            labels = entry.value.get("adapters") or {}
            server.adapter_versions = {name: parse_version(labels[name]) for name in labels}
            if not server.alive:
                logger.info("llm server in traffic", id=server.id, version=server.version)
            server.alive = True

    def _add_server(self, entry: Entry) -> LLMServerState:
        """Create the server of an entry, in place of an earlier server of this id."""
        address = entry.value["address"]
        server = LLMServerState(
            id=entry.id,
            address=address,
            protocol=part_of_entry("server_protocol", entry.value)(),
            headers=self.registry.headers(str(entry.value.get("type"))),
        )
        self.router.servers[entry.id] = server
        logger.info("llm server found", id=entry.id, address=address)
        return server

    async def _run(self) -> None:
        pause_s = self.refresh_s
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._refresh_requested.wait()
                is_urgent = self._refresh_requested.is_set()
                pause_s = FIRST_S if is_urgent else min(2 * pause_s, self.refresh_s)
                self._refresh_requested.clear()
                await self.refresh()
        finally:
            self._changed.set()  # waiting requests continue and find that the task ended
