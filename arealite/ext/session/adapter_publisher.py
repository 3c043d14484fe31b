"""Sends adapters to all servers by name, one at a time, while requests of other adapters run.

A server that starts late or restarts gets the newest version of each adapter. Until then it has no
adapter of that name, and refuses requests for it. After each update, the server must give a fixed
row the trainer's log-probabilities, as with the canary of the policy.
"""

import asyncio
import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.publisher import PublishReport
from arealite.base import log
from arealite.base.errors import RoleError, UserError
from arealite.ext.session.adapter_server import (
    FAILURES,
    AdapterLost,
    AdapterRefused,
    AdapterServer,
    StagedAdapter,
    Switch,
    adapter_server,
)
from arealite.impl.http_client import Pool
from arealite.system.names.name_registry import NameRegistry

logger = log.get(__name__)

WATCH_S = 1.0
"""Seconds between two looks for servers that lack an adapter."""
RETRY_S = 0.25
"""Pause between attempts while no server can be reached."""
CLOSE_S = 5.0
"""Longest wait for servers to unload the adapters at the end."""


class AdapterPublisher:
    """Keeps every server at the newest version of each adapter; used in one event loop."""

    def __init__(self, config: ExperimentConfig) -> None:
        self._config = config
        self._timeout_s = config.trainer.ppo.publisher.timeout_s
        self._connect_s = config.trainer.ppo.collector.client.servers.connect_timeout_s
        self._registry = NameRegistry.of(config)
        self._staged = dict[str, StagedAdapter]()
        self._loaded = defaultdict[tuple[str, object], dict[str, int]](dict[str, int])
        """The versions that each server process has confirmed."""
        self._locks = defaultdict[str, asyncio.Lock](asyncio.Lock)
        """One for each adapter: its updates and its removal are in the order of the calls."""

    def open(self, switch: Switch) -> None:
        """Open connections, in the event loop.

        Args:
            switch: `LLMClient.switch_adapter`.
        """
        self._pool = Pool(self._connect_s)
        self._switch = switch

    async def close(self) -> None:
        """Unload the adapters at servers that continue to run, and close the connections."""
        try:
            async with asyncio.timeout(CLOSE_S):
                for server in await self._servers():
                    for name in [*self._staged]:
                        if server.entry.value.get("type") == "external":
                            await self._unload(server, name)
        except TimeoutError:
            logger.warning("adapters were not unloaded", seconds=CLOSE_S)
        self._pool.close()

    async def publish(
        self,
        name: str,
        version: int,
        staged: Future[StagedAdapter],
        confirm: Callable[[int], None],
    ) -> PublishReport:
        """Load a version at all servers.

        Args:
            name: The adapter.
            version: Its version.
            staged: Resolves when it is written.
            confirm: Is called with the version once servers hold it.

        Raises:
            UserError: A server cannot load adapters by name.
            RoleError: No server has confirmed it.
        """
        try:
            async with self._locks[name]:
                report = await self._publish(await asyncio.wrap_future(staged))
        except (RoleError, asyncio.CancelledError) as error:
            reason = str(error) or "the servers have ended"
            text = f"version {version} of the adapter '{name}' was not published: {reason}"
            raise RoleError(text) from error
        confirm(version)
        return report

    async def _publish(self, adapter: StagedAdapter) -> PublishReport:
        begin = time.perf_counter()
        errors = await self._load_at_all(adapter)
        self._staged[adapter.name] = adapter
        if adapter.scores_T is not None:
            _remove_older(adapter)
        return PublishReport(
            version=adapter.version,
            load_s=time.perf_counter() - begin,
            num_bytes=sum(file.stat().st_size for file in adapter.folder.iterdir()),
            servers=list(errors.values()).count(None),
            quarantined=[server_id for server_id, error in errors.items() if error],
        )

    async def _load_at_all(self, adapter: StagedAdapter) -> dict[str, BaseException | None]:
        """Load an adapter at all servers; return the error of each, None of one that confirmed it.

        It is tried again while no server can be reached: they may be starting.
        """
        until = time.monotonic() + self._timeout_s
        while True:
            servers = await self._servers()
            for server in servers:
                if server.obstacle:
                    raise UserError(server.obstacle)
            updates = [self._load(server, adapter) for server in servers]
            outcomes = await asyncio.gather(*updates, return_exceptions=True)
            errors = [outcome for outcome in outcomes if outcome is not None]
            for error in errors:
                if not isinstance(error, FAILURES):
                    raise error
            if len(errors) < len(servers):
                server_ids = [server.entry.id for server in servers]
                return dict(zip(server_ids, outcomes, strict=True))
            is_refused = any(isinstance(error, AdapterRefused) for error in errors)
            if is_refused or time.monotonic() >= until:
                raise RoleError("; ".join(map(str, errors)) or "no server is registered")
            await asyncio.sleep(RETRY_S)

    async def remove(self, name: str, removed: Future[None]) -> None:
        """Unload an adapter at all servers, after `removed` has resolved."""
        async with self._locks[name]:
            await asyncio.wrap_future(removed)
            adapter = self._staged.pop(name, None)
            for server in await self._servers():
                self._loaded[server.process].pop(name, None)
                await self._unload(server, name)
            if adapter is not None and adapter.scores_T is not None:
                shutil.rmtree(adapter.folder, ignore_errors=True)

    async def watch(self) -> None:
        """Load adapters at servers that lack them, until it is cancelled."""
        while True:
            await asyncio.sleep(WATCH_S)
            if not self._staged:
                continue
            try:
                for server in await self._servers():
                    for name in [*self._staged]:
                        async with self._locks[name]:
                            await self._load_missing(server, name)
            except Exception as error:  # noqa: BLE001  (the session goes on)
                logger.warning("adapters not checked", error=str(error))

    async def _load_missing(self, server: AdapterServer, name: str) -> None:
        adapter = self._staged.get(name)
        if adapter is None:
            return
        is_confirmed = self._loaded[server.process].get(name) == adapter.version
        try:
            if not (is_confirmed and await server.holds(adapter)):
                await self._load(server, adapter)
        except FAILURES as error:
            server_id = server.entry.id
            logger.warning("adapter not loaded", server=server_id, adapter=name, error=str(error))

    async def _load(self, server: AdapterServer, adapter: StagedAdapter) -> None:
        """Load an adapter at one server; see `AdapterServer.load`."""
        versions = self._loaded[server.process]
        try:
            await server.load(adapter)
        except AdapterLost:
            versions.pop(adapter.name, None)
            raise
        versions[adapter.name] = adapter.version

    async def _unload(self, server: AdapterServer, name: str) -> None:
        with suppress(*FAILURES):  # it has ended, or has no version
            await server.unload(name)

    async def _servers(self) -> list[AdapterServer]:
        """Return the servers that have the base weights."""
        entries = await asyncio.to_thread(self._registry.list, "llm_server")
        return [
            adapter_server(
                entry,
                self._config,
                self._pool,
                self._registry.headers(str(entry.value.get("type"))),
                self._switch,
            )
            for entry in entries
            if not str(entry.value.get("version")).startswith("-")
        ]


def _remove_older(adapter: StagedAdapter) -> None:
    """Remove the folders of older versions. A later publish may have staged a newer one."""
    for folder in adapter.folder.parent.glob("[0-9]*"):
        if int(folder.name) < adapter.version:
            shutil.rmtree(folder, ignore_errors=True)
