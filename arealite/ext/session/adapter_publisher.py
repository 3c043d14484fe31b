"""Sends adapters to all servers by name, one at a time, while requests of other adapters run.

A server that starts late or restarts gets the newest version of each adapter. Until then it has no
adapter of that name, and refuses requests for it.
"""

import asyncio
import shutil
import time
from collections import defaultdict
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.publisher import PublishReport
from arealite.base import log
from arealite.base.errors import RoleError, UserError
from arealite.impl.http_client import Pool, error_message
from arealite.system.health.waits import Wait
from arealite.system.names.name_registry import Entry, NameRegistry

logger = log.get(__name__)

WATCH_S = 1.0
"""Seconds between two looks for servers that lack an adapter."""
RETRY_S = 0.25
"""Pause between attempts while no server can be reached."""
FAILURES = (OSError, RoleError)
"""Errors of one server."""


class AdapterRefused(RoleError):
    """A server refuses an adapter; it would do so again."""


@dataclass(frozen=True, kw_only=True)
class StagedAdapter:
    """The newest version of an adapter."""

    name: str
    version: int
    folder: Path
    is_own: bool
    """Whether the parent of the folder has versions of this adapter and nothing else."""


class AdapterPublisher:
    """Keeps every server at the newest version of each adapter; used in one event loop."""

    def __init__(self, config: ExperimentConfig) -> None:
        self._timeout_s = config.trainer.ppo.publisher.timeout_s
        self._connect_s = config.trainer.ppo.collector.client.servers.connect_timeout_s
        self._registry = NameRegistry.of(config)
        self._staged = dict[str, StagedAdapter]()
        self._loaded = defaultdict[tuple[str, object], dict[str, int]](dict[str, int])
        """The versions that each server process has confirmed."""
        self._locks = defaultdict[str, asyncio.Lock](asyncio.Lock)
        """One for each adapter: its updates and its removal are in the order of the calls."""

    def open(self) -> None:
        """Open connections, in the event loop."""
        self._pool = Pool(self._connect_s)

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()

    async def publish(
        self,
        name: str,
        version: int,
        staged: Future[Path],
        *,
        is_own: bool = True,
    ) -> PublishReport:
        """Load a version at all servers.

        Args:
            name: The adapter.
            version: Its version.
            staged: Resolves to its folder.
            is_own: Whether older versions beside the folder are removed, and all at the end.

        Raises:
            UserError: A server cannot load adapters by name.
            RoleError: No server has confirmed it.
        """
        async with self._locks[name]:
            folder = await asyncio.wrap_future(staged)
            begin = time.perf_counter()
            self._staged[name] = StagedAdapter(
                name=name,
                version=version,
                folder=folder,
                is_own=is_own,
            )
            try:
                num_confirmed = await self._load_at_all(self._staged[name])
            except (RoleError, asyncio.CancelledError) as error:
                reason = str(error) or "the servers have ended"
                text = f"version {version} of the adapter '{name}' was not published: {reason}"
                raise RoleError(text) from error
            if is_own:
                _remove_older(folder)
        return PublishReport(
            version=version,
            load_s=time.perf_counter() - begin,
            num_bytes=sum(file.stat().st_size for file in folder.iterdir()),
            servers=num_confirmed,
        )

    async def _load_at_all(self, adapter: StagedAdapter) -> int:
        """Load an adapter at all servers; return the number of those that have confirmed it.

        It is tried again while no server can be reached: they may be starting.
        """
        until = time.monotonic() + self._timeout_s
        while True:
            entries = await self._servers()
            for entry in entries:
                _check_server(entry)
            updates = [self._load(entry, adapter) for entry in entries]
            outcomes = await asyncio.gather(*updates, return_exceptions=True)
            errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
            for error in errors:
                if not isinstance(error, FAILURES):
                    raise error
            if len(errors) < len(entries):
                return len(entries) - len(errors)
            is_refused = any(isinstance(error, AdapterRefused) for error in errors)
            if is_refused or time.monotonic() >= until:
                raise RoleError("; ".join(map(str, errors)) or "no server is registered")
            await asyncio.sleep(RETRY_S)

    async def remove(self, name: str, removed: Future[None]) -> None:
        """Unload an adapter at all servers, after `removed` has resolved."""
        async with self._locks[name]:
            await asyncio.wrap_future(removed)
            adapter = self._staged.pop(name, None)
            for entry in await self._servers():
                if self._loaded[_process(entry)].pop(name, None) is not None:
                    with suppress(*FAILURES):  # it has ended, or has no adapters
                        await self._post(entry, "/unload_lora_adapter", {"lora_name": name})
            if adapter is not None and adapter.is_own:
                shutil.rmtree(adapter.folder.parent, ignore_errors=True)

    async def watch(self) -> None:
        """Load adapters at servers that lack them, until it is cancelled."""
        while True:
            await asyncio.sleep(WATCH_S)
            if not self._staged:
                continue
            for entry in await self._servers():
                for name in [*self._staged]:
                    async with self._locks[name]:
                        await self._load_missing(entry, name)

    async def _load_missing(self, entry: Entry, name: str) -> None:
        adapter = self._staged.get(name)
        if adapter is None or self._loaded[_process(entry)].get(name) == adapter.version:
            return
        try:
            await self._load(entry, adapter)
        except FAILURES as error:
            logger.warning("adapter not loaded", server=entry.id, adapter=name, error=str(error))

    async def _load(self, entry: Entry, adapter: StagedAdapter) -> None:
        """Load an adapter at one server, which confirms its version.

        Raises:
            AdapterRefused: The server refused it, or has confirmed another version.
        """
        body = {
            "lora_name": adapter.name,
            "lora_path": str(adapter.folder),
            "weight_version": str(adapter.version),
        }
        answer = await self._post(entry, "/load_lora_adapter", body)
        confirmed = answer.get("loaded_adapters", {}).get(adapter.name)
        if confirmed != str(adapter.version):
            raise AdapterRefused(f"{entry.id} holds version {confirmed} of '{adapter.name}'")
        self._loaded[_process(entry)][adapter.name] = adapter.version

    async def _post(
        self, entry: Entry, path: str, body: dict[str, str]
    ) -> dict[str, dict[str, str]]:
        """Return the answer of a server.

        Raises:
            OSError: It cannot be reached in time.
            AdapterRefused: It refused the request.
        """
        reply = Wait(
            event=f"an answer of {path}",
            owner="session",
            on=f"llm_server-{entry.id}",
            seconds=self._timeout_s,
        )
        headers = self._registry.headers(str(entry.value.get("type")))
        with reply:
            url = f"{entry.value['address']}{path}"
            status, raw = await self._pool.request(url, headers, body)
        if status != 200:
            raise AdapterRefused(f"{entry.id}: {error_message(status, raw)}")
        return msgspec.json.decode(raw)

    async def _servers(self) -> list[Entry]:
        return await asyncio.to_thread(self._registry.list, "llm_server")


def _remove_older(folder: Path) -> None:
    for older in folder.parent.iterdir():
        if older != folder:
            shutil.rmtree(older, ignore_errors=True)


def _process(entry: Entry) -> tuple[str, object]:
    """Return what a restarted server has another one of."""
    return str(entry.value["address"]), entry.value.get("pid")


def _check_server(entry: Entry) -> None:
    """Raise UserError if a server cannot load adapters by name."""
    if "adapters" not in entry.value:
        raise UserError(
            f"the server at {entry.value['address']} cannot load adapters by name. "
            "Let the session start its servers (servers=1), without `addresses`."
        )
