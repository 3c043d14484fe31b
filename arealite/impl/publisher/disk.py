"""Publishes weights through files: staged first, then loaded by all servers at the same time.

A thread of its own runs the event loop, so that late and restarted servers are healed while the
trainer computes.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp

from arealite.api.publisher import PublisherConfig, PublishReport, WeightPublisher
from arealite.base import log
from arealite.base.errors import RoleError
from arealite.impl.publisher.server_push import FAILURES, PushTimes, Server
from arealite.impl.publisher.staging import TMPFS, Staging
from arealite.system.name_registry import Entry, NameRegistry

if TYPE_CHECKING:
    import torch

logger = log.get(__name__)

WATCH_S = 1.0
"""How often registered servers are compared with the newest version."""
RETRY_S = 0.25
"""Pause between attempts while no server has taken a version (the only one may be restarting)."""


class DiskPublisher(WeightPublisher):
    """Weights on tmpfs or a shared folder; servers get traffic by the version they confirmed."""

    def __init__(
        self,
        config: PublisherConfig,
        *,
        registry: NameRegistry,
        fallback_dir: Path,
        model_path: Path,
    ) -> None:
        """Start watching. `model_path`: whose config and tokenizer files go into each version."""
        self.config, self.registry = config, registry
        self.fallback_dir, self.model_path = fallback_dir, model_path
        self._staging: Staging | None = None
        self._newest: tuple[int, Path] | None = None
        self._staged = (0.0, 0)
        self._servers: dict[tuple[str, Any], Server] = {}
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._closed, self._closing = False, threading.Lock()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._ready = threading.Event()
        self._thread.start()
        self._ready.wait(10.0)

    def stage(self, version: int, weights: Iterator[tuple[str, torch.Tensor]]) -> bool:
        begin = time.perf_counter()
        if self._staging is None:
            self._staging = Staging(self._parent(), self.model_path)
        folder, num_bytes = self._staging.write(version, weights)
        self._newest = (version, folder)
        self._staged = (time.perf_counter() - begin, num_bytes)
        return False

    def push(self, version: int) -> PublishReport:
        assert self._staging is not None, "a version is staged before it is pushed"
        stage_s, num_bytes = self._staged
        with self._closing:
            if self._closed:
                raise RoleError(f"the publisher was closed before version {version} was pushed")
            pushed = asyncio.run_coroutine_threadsafe(self._push_all(version), self._loop)
        confirmed, quarantined = pushed.result()
        self._staging.keep_only(version)
        report = PublishReport(
            version=version,
            stage_s=stage_s,
            num_bytes=num_bytes,
            servers=len(confirmed),
            quarantined=quarantined,
            **{f.name: max(getattr(t, f.name) for t in confirmed) for f in fields(PushTimes)},
        )
        stall_s = report.stall_s
        logger.info("weights published", version=version, servers=report.servers, stall_s=stall_s)
        return report

    def close(self) -> None:
        with self._closing:
            self._closed = True
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(self.config.timeout_s + 10.0)
        if self._staging is not None:
            self._staging.close()
            self._staging = None

    # ------------------------------------------------------------ in the publisher's thread

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, connect=5.0)
        async with aiohttp.ClientSession(timeout=timeout) as self._session:
            self._ready.set()
            try:
                async with asyncio.TaskGroup() as tasks:
                    watch = tasks.create_task(self._watch(), name="watch servers")
                    await self._stop.wait()
                    watch.cancel()
            finally:  # a push that is cut off continues its servers, for which it needs the session
                pushes = asyncio.all_tasks() - {asyncio.current_task()}
                for push in pushes:
                    push.cancel()
                await asyncio.gather(*pushes, return_exceptions=True)

    async def _push_all(self, version: int) -> tuple[list[PushTimes], list[str]]:
        """Bring every server in traffic to `version`; try again until one has it or time is up.

        Raises:
            RoleError: none has it; names the servers and what each said.
        """
        give_up = time.monotonic() + self.config.timeout_s
        while True:
            servers = await self._find_servers()
            asked = [server for server in servers if server.error is None] or servers
            await asyncio.gather(*(self._bring(server) for server in asked))
            if confirmed := [server.times for server in asked if server.held == version]:
                return confirmed, [server.id for server in servers if server.error is not None]
            if time.monotonic() >= give_up:
                break
            await asyncio.sleep(RETRY_S)
        said = "; ".join(f"{s.id} at {s.address}: {s.error}" for s in servers)
        raise RoleError(
            f"no server took version {version} in {self.config.timeout_s:g} s. "
            + (said or f"None is registered in {self.registry.root}; start one.")
        )

    async def _bring(self, server: Server, *, ask: bool = False) -> None:
        """Bring one server to the newest version, if there is one. `ask`: trust no memory of it."""
        async with server.lock:
            if self._newest is None:
                return
            version, folder = self._newest
            try:
                if server.held == version and (not ask or await server.version() == str(version)):
                    return
                mode, seconds = self.config.pause_mode, self.config.timeout_s
                await server.bring(version, folder, mode=mode, seconds=seconds)
            except FAILURES as error:
                logger.warning("server quarantined", server=server.id, error=str(error))
                return
            if ask:
                logger.info("server healed", server=server.id, version=version)

    async def _watch(self) -> None:
        """Heal servers. Waits for: the clock. Unblocks: late, restarted and failed servers."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(WATCH_S)
                for server in await self._find_servers():
                    if not server.lock.locked():
                        tasks.create_task(self._bring(server, ask=True), name=f"heal {server.id}")

    async def _find_servers(self) -> list[Server]:
        """Return the registered servers; one that restarted is new, and nothing is known of it."""
        entries = await asyncio.to_thread(self.registry.list, "llm_server")
        found = {(str(e.value["address"]), e.value.get("pid")): e for e in entries}
        for key in self._servers.keys() - found.keys():
            del self._servers[key]
        for key in found.keys() - self._servers.keys():
            self._servers[key] = Server(found[key].id, key[0], self._session)
        return [self._servers[key] for key in found]

    # ------------------------------------------------------------ where files go

    def _parent(self) -> Path:
        if self.config.disk.dir is not None:
            return Path(self.config.disk.dir).expanduser().absolute()
        entries = self.registry.list("llm_server")
        shared = TMPFS.is_dir() and all(_is_here(entry) for entry in entries)
        return TMPFS if shared else self.fallback_dir


def _is_here(entry: Entry) -> bool:
    """Say whether a server shares this host's tmpfs: only own addresses can be bound."""
    host = urlsplit(str(entry.value["address"])).hostname
    family = socket.AF_INET6 if ":" in str(host) else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True
