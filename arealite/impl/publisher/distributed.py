"""Publishes weights through a process group of rank 0 and the servers: no file, no second copy.

Buckets go out while the next one is gathered from the shards. Nothing is kept, so what a server
lacks the trainer must stream again; and a server that is lost in the middle leaves the others with
a part of a version: they stay paused until a whole one has come.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from arealite.api.config import ExperimentConfig
from arealite.api.engine import TrainEngine
from arealite.base import log
from arealite.base.errors import DeadlineError, RoleError
from arealite.impl.publisher.control import FAILURES, Refused, Server
from arealite.impl.publisher.servers import ServersPublisher
from arealite.impl.weights import group as groups
from arealite.impl.weights.buckets import Bucket, pack
from arealite.system.health.waits import Wait

logger = log.get(__name__)

GRACE_S = 1.0
"""When one server has failed, the others have this long to say so too."""
PATH = "/update_weights_from_distributed"


class Lost(Exception):
    """Some servers failed in the middle; `stage` begins anew with the others."""


@dataclass(eq=False)
class Update:
    """One attempt at some servers, which are locked meanwhile."""

    version: int
    servers: Sequence[Server]
    until: float
    """Monotonic time at which a server has failed."""
    flush: dict[Server, bool] = field(default_factory=dict)
    moments: dict[Server, tuple[float, float]] = field(default_factory=dict)
    """When each was told to pause, and paused."""


class DistributedPublisher(ServersPublisher):
    """`stage` does everything; `push` reports."""

    wants_device = True

    def __init__(self, config: ExperimentConfig, engine: TrainEngine) -> None:
        self._group: dist.ProcessGroup | None = None
        self._name = ""
        self._members: Sequence[Server] = ()
        self._failures: dict[Server, int] = {}
        self._rests: dict[Server, float] = {}
        """Monotonic time before which a server that failed is not tried again."""
        super().__init__(config, engine)

    def stage(self, version: int, weights: Iterator[tuple[str, torch.Tensor]]) -> bool:
        try:
            return self._stage(version, weights)
        finally:
            for _ in weights:  # the other ranks take part to the end
                pass

    @property
    def starving(self) -> bool:
        return any(self._needs(server) for server in list(self._servers.values()))

    def close(self) -> None:
        with suppress(RoleError):
            self._leave()
        super().close()

    async def bring(self, server: Server, version: int) -> None:
        """See that it could take a version; the trainer streams it when it sees `starving`."""
        if not server.can.distributed or server.can.dp != 1:
            raise RoleError(
                f"{server.address} cannot join a process group (dp {server.can.dp}); use "
                "publisher.type=disk, or dp=1"
            )
        await server.version()

    # ------------------------------------------------------------ in the trainer's thread

    def _stage(self, version: int, weights: Iterator[tuple[str, torch.Tensor]]) -> bool:
        begin = time.perf_counter()
        if not self.shapes:  # all are checked before the first is sent
            for _ in self.noted(weights):
                pass
            return True
        self.newest = version
        buckets = pack(self.noted(weights), self.config.bucket_mb << 20)
        first = next(buckets)
        while servers := self.call(self._stale_servers(version)):
            update = Update(version, servers, time.monotonic() + self.config.timeout_s)
            try:
                self._join(servers, first.tensors[0].device.type)
                self.stage_s = time.perf_counter() - begin
                self.call(self._open(update))
            except Lost:
                continue  # nothing was sent yet
            try:
                self._send(update, itertools.chain([first], buckets))
                return not self.call(self._finish(update))
            except Lost:
                self._leave()
                return True
            finally:
                for server in servers:
                    self._loop.call_soon_threadsafe(server.lock.release)
        return False

    def _send(self, update: Update, buckets: Iterator[Bucket]) -> None:
        """Send every bucket while the next one is gathered.

        Raises:
            Lost: some servers did not receive one.
        """
        *_, final = self.shapes
        settle: Callable[[], None] = lambda: None  # noqa: E731
        for bucket in buckets:
            settle()
            settle = self._broadcast(update, bucket, last=bucket.layout.names[-1] == final)
        settle()

    def _broadcast(self, update: Update, bucket: Bucket, *, last: bool) -> Callable[[], None]:
        """Begin to send a bucket; return what waits for its end."""
        layout = bucket.layout
        whole = self._backend == "nccl" and all(s.can.buckets for s in update.servers)
        body = {
            "names": layout.names,
            "dtypes": layout.dtypes,
            "shapes": layout.shapes,
            "group_name": self._name,
        } | ({"load_format": "flattened_bucket"} if whole else {})
        version = update.version if last else None

        async def receive(server: Server) -> None:
            await server.update(PATH, body, version=version, flush=last and update.flush[server])

        posted = self.submit(self._each(update, receive))
        parts = [bucket.flat] if whole else bucket.tensors
        if self._backend == "gloo":
            parts = [part.cpu() for part in parts]  # no copy where they are there already
        works: list[Any] = []
        with suppress(RuntimeError):  # a server that is gone: it fails to answer, too
            works = [dist.broadcast(p, src=0, group=self._group, async_op=True) for p in parts]

        def settle() -> None:
            posted.result()
            for work in works:
                work.wait()

        return settle

    def _join(self, servers: Sequence[Server], device: str) -> None:
        """Have a group of these servers.

        Raises:
            Lost: some servers did not join.
            RoleError: the port is taken.
        """
        if self._group is not None and self._members == servers:
            return
        self._leave()
        self._name = f"arealite-{secrets.token_hex(8)}"
        self._backend = self.config.distributed.backend
        if self._backend == "auto":
            self._backend = "nccl" if device == "cuda" else "gloo"
        listener, seconds = self._listen(), self.config.timeout_s
        ranks = list(itertools.accumulate((server.can.tp for server in servers), initial=1))
        offsets = dict(zip(servers, ranks, strict=False))
        body: dict[str, Any] = {
            "master_address": self.host,
            "master_port": listener.getsockname()[1],
            "world_size": ranks[-1],
            "group_name": self._name,
            "backend": self._backend,
        }

        async def join(server: Server) -> None:
            offset = {"rank_offset": offsets[server]}
            await server.demand("/init_weights_update_group", body | offset)

        update = Update(-1, servers, time.monotonic() + seconds)
        posted = self.submit(self._each(update, join))
        joined = _in_thread(
            lambda: groups.join(
                listener,
                self._name,
                rank=0,
                world_size=ranks[-1],
                backend=body["backend"],
                seconds=seconds,
            )
        )
        wait([posted, joined], return_when=FIRST_COMPLETED)
        posted.result()
        try:
            self._group, self._members = joined.result(), servers
        except (RuntimeError, OSError) as error:
            raise RoleError(f"no group of {len(servers)} servers was formed: {error}") from error
        logger.info("weight group formed", servers=[s.id for s in servers], backend=self._backend)

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        with suppress(RuntimeError):
            groups.leave(group)
        name = self._name

        async def leave() -> None:
            there = [server for server in self._members if server.error is None]
            left = (s.post("/destroy_weights_update_group", {"group_name": name}) for s in there)
            wait = Wait("servers to leave a group", owner="publisher", seconds=GRACE_S)
            with suppress(DeadlineError), wait:
                await asyncio.gather(*left, return_exceptions=True)

        self.call(leave())

    def _listen(self) -> socket.socket:
        """Listen where the servers will look for rank 0."""
        port = self.config.distributed.port
        try:
            return socket.create_server((self.host, port))
        except OSError as error:
            raise RoleError(
                f"trainer.ppo.publisher.distributed.port={port} at cluster.host={self.host} cannot "
                f"be listened at: {error}. Use another, or 0."
            ) from error

    # ------------------------------------------------------------ in the publisher's thread

    def _needs(self, server: Server) -> bool:
        is_behind = self.newest is not None and server.held != self.newest
        well = is_behind and server.known is not None and server.error is None
        return well and time.monotonic() >= self._rests.get(server, 0.0)

    async def _stale_servers(self, version: int) -> Sequence[Server]:
        """Return the servers that lack `version` and can take it, [] if none lacks it.

        Raises:
            RoleError: none holds it, and for `timeout_s` none could take it.
        """
        await self.push_all(version)
        return sorted(filter(self._needs, self._servers.values()), key=lambda server: server.id)

    async def _open(self, update: Update) -> None:
        """Lock and pause all, and begin; Lost: some failed, and none is locked."""
        for server in update.servers:
            await server.lock.acquire()

        async def begin(server: Server) -> None:
            began = time.perf_counter()
            server.held = None
            update.flush[server] = await server.pause(self.config.pause_mode)
            update.moments[server] = (began, time.perf_counter())
            await server.begin()

        try:
            await self._each(update, begin)
        except BaseException:
            for server in update.servers:
                server.lock.release()
            raise

    async def _finish(self, update: Update) -> bool:
        """Continue all that hold the whole version now; return whether any confirmed it."""

        async def finish(server: Server) -> None:
            await server.end()
            loaded = time.perf_counter()
            await server.resume()
            await server.confirm(
                update.version, (*update.moments[server], loaded, time.perf_counter())
            )
            self._failures.pop(server, None)

        with suppress(Lost):  # each for itself: the others hold the version
            await self._each(update, finish)
        return any(server.held == update.version for server in update.servers)

    async def _each(self, update: Update, do: Callable[[Server], Awaitable[None]]) -> None:
        """Do it with all servers at once; quarantine who is to blame for a failure.

        Raises:
            Lost: some failed.
        """

        async def bounded(server: Server) -> None:
            left = max(0.1, update.until - time.monotonic())
            with server.bounded(f"{server.id} to take weights", left):
                await do(server)

        tasks = {asyncio.ensure_future(bounded(server)): server for server in update.servers}
        try:
            _, late = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if late:
                await asyncio.wait(late, timeout=GRACE_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        failed = {tasks[t]: t.exception() for t in tasks if not t.cancelled() and t.exception()}
        # Who answered was only told that another one is gone, if one is.
        gone = {s: e for s, e in failed.items() if not isinstance(e, Refused)} or failed
        for server, error in gone.items():
            if not isinstance(error, FAILURES):
                raise error or RuntimeError
            self.quarantine(server, error)
            count = self._failures[server] = self._failures.get(server, 0) + 1
            self._rests[server] = time.monotonic() + min(2.0**count, self.config.timeout_s)
        if gone:
            raise Lost


def _in_thread(job: Callable[[], Any]) -> Future[Any]:
    """Run what may block for long after nobody waits for it; it does not hold the process."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(job())
        except BaseException as error:  # noqa: BLE001  (raised again by result)
            future.set_exception(error)

    threading.Thread(target=run, name="join group", daemon=True).start()
    return future
