"""Keeps the router's servers up to date: from the name registry, and by asking each server itself.

One owned task does it for all requests, which only wait for its `changed` event.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from arealite.base import log
from arealite.base.errors import InvariantError
from arealite.impl.client import wire
from arealite.impl.client.routing import Router, Server
from arealite.system.name_registry import Entry, NameRegistry

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
            raise InvariantError("the llm client is not running: call start() first")
        await self._changed.wait()

    async def refresh(self) -> None:
        """Bring the router's servers in line with the registry and with what they say."""
        entries = await asyncio.to_thread(self.registry.list, "llm_server")
        named = {entry.id: entry for entry in entries}
        servers = self.router.servers
        for entry in entries:
            held = servers.get(entry.id)
            if held is None or held.address != entry.value["address"]:
                if held is not None:
                    held.lose()
                servers[entry.id] = await self._meet(entry)
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

    async def _meet(self, entry: Entry) -> Server:
        """Make a server from its entry; ask it for what the entry leaves out."""
        value = entry.value
        model = await asyncio.to_thread(read_model_config, value.get("model_path"))
        context = value.get("context_length") or model.get("max_position_embeddings")
        server = Server(
            entry.id,
            value["address"],
            vocab_size=value.get("vocab_size") or model.get("vocab_size"),
            context_length=context,
        )
        if not value.get("context_length"):
            with suppress(aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
                info = wire.decode_server_info(await self._get(server, "/server_info"))
                server.context_length = info.context_length or context
        logger.info("llm server found", id=server.id, address=server.address)
        return server

    async def _ask(self, server: Server, is_named: bool) -> None:
        """Ask a server for its version; a silent or refusing one gets no traffic."""
        try:
            info = wire.decode_model_info(await self._get(server, "/model_info"))
        except TimeoutError:
            server.misses += 1
            if server.misses >= MAX_MISSES or not is_named:
                self._lose(server, f"no answer for {server.misses} x {self.timeout_s} s")
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            self._lose(server, repr(error))
        else:
            server.misses = 0
            server.version = wire.parse_version(info.weight_version)
            if is_named and not server.alive:
                logger.info("llm server in traffic", id=server.id, version=server.version)
            server.alive = is_named
            self._tell()  # now: a silent server must not keep this one waiting

    def _lose(self, server: Server, why: str) -> None:
        if server.alive or server.scopes:
            logger.warning("llm server lost", id=server.id, address=server.address, error=why)
        server.lose()

    async def _get(self, server: Server, path: str) -> bytes:
        async with (
            asyncio.timeout(self.timeout_s),
            self._session.get(server.address + path) as response,
        ):
            response.raise_for_status()
            return await response.read()


def read_model_config(path: str | None) -> dict[str, Any]:
    """Return a model folder's config.json under its generation_config.json; {} without."""
    merged: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json"):
        with suppress(OSError, ValueError, TypeError):
            merged |= json.loads((Path(path or "") / name).read_text(encoding="utf-8"))
    return merged


def stop_tokens(model: dict[str, Any]) -> frozenset[int]:
    """Return the token ids with which the model itself ends a generation."""
    eos = model.get("eos_token_id")
    return frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])
