"""Sends adapters to all servers by name, one at a time, while requests of other adapters run.

A server that starts late or restarts gets the newest version of each adapter. Until then it has no
adapter of that name, and refuses requests for it. After each update, the server must give a fixed
row the trainer's log-probabilities, as with the canary of the policy.

Shape letter: T = tokens of the row but the first one.
"""

import asyncio
import shutil
import time
from collections import defaultdict
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.publisher import PublishReport
from arealite.api.server_protocol import (
    GenerateRequest,
    ServerAnswer,
    ServerProtocol,
    part_of_entry,
)
from arealite.base import log
from arealite.base.errors import RoleError, UserError
from arealite.ext.served_policy.canary import tolerance_of
from arealite.ext.served_policy.scores import NotComparable, is_within, read_scores
from arealite.impl.http_client import Pool, error_message
from arealite.system.health.waits import Wait
from arealite.system.names.name_registry import Entry, NameRegistry

logger = log.get(__name__)

WATCH_S = 1.0
"""Seconds between two looks for servers that lack an adapter."""
RETRY_S = 0.25
"""Pause between attempts while no server can be reached."""
PROOF_S = 5.0
"""Longest wait for a server's log-probabilities; a busy server may answer later."""
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
    row: list[int]
    """Tokens that trainer and servers score."""
    scores_T: np.ndarray | None
    """The trainer's log-probabilities of the row; None: the adapter comes from a folder of the
    user, which stays, and is not proven."""


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
        staged: Future[StagedAdapter],
    ) -> PublishReport:
        """Load a version at all servers.

        Args:
            name: The adapter.
            version: Its version.
            staged: Resolves when it is written.

        Raises:
            UserError: A server cannot load adapters by name.
            RoleError: No server has confirmed it.
        """
        try:
            async with self._locks[name]:
                return await self._publish(await asyncio.wrap_future(staged))
        except (RoleError, asyncio.CancelledError) as error:
            reason = str(error) or "the servers have ended"
            text = f"version {version} of the adapter '{name}' was not published: {reason}"
            raise RoleError(text) from error

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
            entries = await self._servers()
            for entry in entries:
                _check_server(entry)
            updates = [self._load(entry, adapter) for entry in entries]
            outcomes = await asyncio.gather(*updates, return_exceptions=True)
            errors = [outcome for outcome in outcomes if outcome is not None]
            for error in errors:
                if not isinstance(error, FAILURES):
                    raise error
            if len(errors) < len(entries):
                server_ids = [entry.id for entry in entries]
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
            for entry in await self._servers():
                if self._loaded[_process(entry)].pop(name, None) is not None:
                    with suppress(*FAILURES):  # it has ended, or has no adapters
                        await self._post(entry, "/unload_lora_adapter", {"lora_name": name})
            if adapter is not None and adapter.scores_T is not None:
                shutil.rmtree(adapter.folder, ignore_errors=True)

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
            AdapterRefused: The server refused it, or has another version or other weights.
        """
        body = {
            "lora_name": adapter.name,
            "lora_path": str(adapter.folder),
            "weight_version": str(adapter.version),
        }
        raw = await self._post(entry, "/load_lora_adapter", body)
        answer: dict[str, Any] = msgspec.json.decode(raw)
        confirmed = answer.get("loaded_adapters", {}).get(adapter.name)
        if confirmed != str(adapter.version):
            raise AdapterRefused(f"{entry.id} holds version {confirmed} of '{adapter.name}'")
        if adapter.scores_T is not None and self._config.trainer.ppo.publisher.canary:
            await self._prove(entry, adapter, adapter.scores_T)
        self._loaded[_process(entry)][adapter.name] = adapter.version

    async def _prove(self, entry: Entry, adapter: StagedAdapter, scores_T: np.ndarray) -> None:
        """Compare a server's log-probabilities with the trainer's, unless the server is busy.

        Raises:
            AdapterRefused: They differ. The adapter was unloaded.
        """
        protocol: ServerProtocol = part_of_entry("server_protocol", entry.value)()

        async def generate(request: GenerateRequest) -> ServerAnswer:
            body = protocol.encode_request(replace(request, adapter=adapter.name))
            raw = await self._post(entry, protocol.generate_path, msgspec.Raw(body))
            return protocol.decode_answer(raw)

        try:
            with self._wait(entry, f"scores of adapter {adapter.name}", PROOF_S):
                scores = await read_scores(generate, adapter.row, adapter.version)
        except (NotComparable, *FAILURES) as error:
            logger.warning("adapter not proven", server=entry.id, reason=str(error))
            return
        folder = Path(self._config.model.path)
        tolerance = tolerance_of(self._config, folder, entry.value.get("dtype"))
        errors = tolerance.errors(scores.prompt_T, scores_T)
        if not is_within(errors, tolerance.bound(scores_T)):
            self._loaded[_process(entry)].pop(adapter.name, None)
            await self._post(entry, "/unload_lora_adapter", {"lora_name": adapter.name})
            mean, largest = errors
            raise AdapterRefused(
                f"{entry.id} computes other log-probabilities with version {adapter.version} of "
                f"'{adapter.name}' than the trainer (mean {mean:.2g}, largest {largest:.2g} nats)"
            )

    def _wait(self, entry: Entry, event: str, seconds: float) -> Wait:
        return Wait(event=event, owner="session", on=f"llm_server-{entry.id}", seconds=seconds)

    async def _post(self, entry: Entry, path: str, body: dict[str, str] | msgspec.Raw) -> bytes:
        """Return the body of a server's answer.

        Raises:
            OSError: It cannot be reached in time.
            AdapterRefused: It refused the request.
        """
        headers = self._registry.headers(str(entry.value.get("type")))
        with self._wait(entry, f"an answer of {path}", self._timeout_s):
            url = f"{entry.value['address']}{path}"
            status, raw = await self._pool.request(url, headers, body)
        if status != 200:
            raise AdapterRefused(f"{entry.id}: {error_message(status, raw)}")
        return raw

    async def _servers(self) -> list[Entry]:
        return await asyncio.to_thread(self._registry.list, "llm_server")


def _remove_older(adapter: StagedAdapter) -> None:
    """Remove the folders of older versions; newer ones may be staged already."""
    for folder in adapter.folder.parent.glob("[0-9]*"):
        if int(folder.name) < adapter.version:
            shutil.rmtree(folder, ignore_errors=True)


def _process(entry: Entry) -> tuple[str, object]:
    """Return address and process id: a restarted server has another id."""
    return str(entry.value["address"]), entry.value.get("pid")


def _check_server(entry: Entry) -> None:
    """Raise UserError if a server cannot load adapters by name."""
    # Only embedded servers report a version for each adapter.
    if "adapters" not in entry.value or entry.value.get("type") != "embedded":
        raise UserError(
            f"the server at {entry.value['address']} cannot load adapters by name. "
            "Let the session start its servers (servers=1), without `addresses`."
        )
