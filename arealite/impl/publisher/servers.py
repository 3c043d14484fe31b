"""The base of publishers that bring weights to servers: it watches, quarantines and heals servers.

A thread of its own runs the event loop, so that late and restarted servers are healed while the
trainer computes.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import abstractmethod
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import torch

from arealite.api.config import ExperimentConfig, run_paths
from arealite.api.engine import TrainEngine
from arealite.api.publisher import PublishReport, WeightPublisher
from arealite.base import log
from arealite.base.errors import RoleError, UserError
from arealite.base.model_folder import read_shapes
from arealite.impl.publisher.control import CONTINUE_S, FAILURES, PushTimes, Server
from arealite.impl.publisher.shapes import Shapes, check_shapes
from arealite.system.health.vitals import watch as watch_loop
from arealite.system.names.registry import NameRegistry

logger = log.get(__name__)

WATCH_S = 1.0
"""How often registered servers are compared with the newest version."""
RETRY_S = 0.25
"""Pause between attempts while no server has taken a version (the only one may be restarting)."""

T = TypeVar("T")


class ServersPublisher(WeightPublisher):
    """Servers get traffic by the version they confirmed; a subclass is one way to bring weights."""

    def __init__(self, config: ExperimentConfig, engine: TrainEngine) -> None:
        """Start watching the servers of the trial."""
        self.config, self.host = config.trainer.ppo.publisher, config.cluster.host
        self.registry, self.paths = NameRegistry.of(config), run_paths(config)
        self.model_path = Path(config.model.path).expanduser()
        self.newest: int | None = None
        """The version that every server should hold."""
        self.shapes: Shapes = {}
        """Of the tensors that are sent; {} before the first version."""
        self.num_bytes, self.stage_s = 0, 0.0
        self._servers: dict[tuple[str, Any], Server] = {}
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._closed, self._closing = False, threading.Lock()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._ready = threading.Event()
        self._thread.start()
        while self._thread.is_alive() and not self._ready.wait(1.0):
            pass  # it may be held up; one that failed has told why, and refuses what it is given

    # ------------------------------------------------------------ called by the trainer

    def push(self, version: int) -> PublishReport:
        confirmed, quarantined = self.call(self.push_all(version))
        times = [server.times for server in confirmed] or [PushTimes(0.0, 0.0, 0.0, 0.0)]
        report = PublishReport(
            version=version,
            stage_s=self.stage_s,
            num_bytes=self.num_bytes,
            servers=len(confirmed),
            quarantined=quarantined,
            **{f.name: max(getattr(t, f.name) for t in times) for f in fields(PushTimes)},
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

    # ------------------------------------------------------------ for the ways

    @abstractmethod
    async def bring(self, server: Server, version: int) -> None:
        """Bring one connected server to `version`, or see to it that `stage` does; lock held."""

    def call(self, job: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the publisher's thread; return its result."""
        return self.submit(job).result()

    def submit(self, job: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine in the publisher's thread."""
        with self._closing:
            if self._closed:
                job.close()
                raise RoleError(f"the publisher was closed before version {self.newest} was pushed")
            return asyncio.run_coroutine_threadsafe(job, self._loop)

    def noted(
        self, weights: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass tensors on; add up their bytes, and check them when all have passed.

        Raises:
            RoleError: one is not of the version before.
            UserError: they are not the tensors of `model_path`, or of the version before.
        """
        shapes, num_bytes = dict[str, list[int]](), 0
        for name, tensor in weights:
            shapes[name] = list(tensor.shape)
            if self.shapes:  # a way that sends at once must not send this one
                check_shapes(
                    {name: shapes[name]}, self.shapes, where="the version before", whole=False
                )
            num_bytes += tensor.nbytes
            yield name, tensor
        held = self.shapes or read_shapes(self.model_path)
        where = "the version before" if self.shapes else self.model_path
        try:
            check_shapes(shapes, held, where=where)
        except RoleError as error:  # a restart would fail in the same way
            raise UserError(f"{error}. The model cannot be published to servers.") from error
        self.shapes, self.num_bytes = shapes, num_bytes

    async def find_servers(self) -> list[Server]:
        """Return the registered servers; one that restarted is new, and nothing is known of it."""
        entries = await asyncio.to_thread(self.registry.list, "llm_server")
        found = {(str(e.value["address"]), e.value.get("pid")): e for e in entries}
        for key in self._servers.keys() - found.keys():
            self._servers.pop(key).forget_pause()
        for key in found.keys() - self._servers.keys():
            entry = found[key]
            folder = str(entry.value.get("model_path") or "")
            headers = self.registry.headers(str(entry.value.get("type") or ""))
            self._servers[key] = Server(entry.id, key[0], self._session, folder, headers)
        for key, entry in found.items():
            self._servers[key].listed = str(entry.value.get("version"))
        return [self._servers[key] for key in found]

    # ------------------------------------------------------------ in the publisher's thread

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, connect=CONTINUE_S)
        async with aiohttp.ClientSession(timeout=timeout) as self._session:
            watch_loop(self._loop)
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
                broken = [server.resume() for server in self._servers.values() if server.broken]
                await asyncio.gather(*broken, return_exceptions=True)

    async def push_all(self, version: int) -> tuple[list[Server], list[str]]:
        """Bring every server in traffic to `version`; again until one has it, or needs `stage`.

        Returns:
            The servers that confirmed it, and the ids of those that failed.

        Raises:
            RoleError: none has it; names the servers and what each said.
        """
        give_up = time.monotonic() + self.config.timeout_s
        while True:
            servers = await self.find_servers()
            asked = [server for server in servers if server.error is None] or servers
            await asyncio.gather(*(self._bring(server) for server in asked))
            confirmed = [server for server in asked if server.held == version]
            if confirmed or self.starving:
                return confirmed, [server.id for server in servers if server.error]
            if time.monotonic() >= give_up:
                said = "; ".join(f"{s.id} at {s.address}: {s.error}" for s in servers)
                raise RoleError(
                    f"no server took version {version} in {self.config.timeout_s:g} s. "
                    + (said or f"None is registered in {self.registry.root}; start one.")
                )
            await asyncio.sleep(RETRY_S)

    async def _bring(self, server: Server, *, ask: bool = False) -> None:
        """Bring one server to the newest version, if there is one. `ask`: see `Server.holds`."""
        async with server.lock:
            version = self.newest
            if version is None:
                return
            try:
                if await server.holds(version, ask=ask):
                    if ask:
                        await server.end_foreign_pause(resume=self.config.continue_paused)
                    return
                server.held = None
                with server.bounded(f"{server.id} to answer", self.config.timeout_s):
                    await server.connect(self.shapes)
                await self.bring(server, version)
                server.error = None
            except FAILURES as error:
                self.quarantine(server, error)
                return
            if ask and server.held == version:
                logger.info("server healed", server=server.id, version=version)

    def quarantine(self, server: Server, error: Exception) -> None:
        """Give up on a server until the watch finds it well."""
        said = f"{type(error).__name__}: {error}"
        if said != server.error:
            logger.warning("server quarantined", server=server.id, error=str(error))
        server.held, server.error = None, said

    async def _watch(self) -> None:
        """Heal servers. Waits for: the clock. Unblocks: late, restarted and failed servers."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(WATCH_S)
                for server in await self.find_servers():
                    if not server.lock.locked():
                        tasks.create_task(self._bring(server, ask=True), name=f"heal {server.id}")
