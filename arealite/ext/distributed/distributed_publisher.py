"""Publishes weights through a process group of rank 0 and the servers: no file, no second copy.

A bucket is sent while the next bucket is gathered from the shards. No version is stored, so the
trainer streams it again for servers that lack it. If a server fails during an update, the others
have partial weights and stay paused until they have received a whole version.
"""

import asyncio
import itertools
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

import torch.distributed as dist

from arealite.api.engine import Named
from arealite.base import log
from arealite.base.errors import DeadlineError, RoleError
from arealite.ext.embedded.futures import resolve
from arealite.ext.weights import process_group as groups
from arealite.ext.weights.buckets import Bucket, pack
from arealite.impl.publisher.control import ServerControl, WeightGroup
from arealite.impl.publisher.servers import (
    GRACE_S,
    PartialUpdate,
    Servers,
    ServersPublisher,
    ServersUpdate,
)
from arealite.system.health.waits import Wait

logger = log.get(__name__)


class DistributedPublisher(ServersPublisher):
    """`stage` updates the servers; `push` only reports."""

    takes_device_tensors = True

    members: Servers = ()
    """The other ranks of the group."""
    group_name = ""
    _backend = ""
    _group: dist.ProcessGroup | None = None

    def stage(self, version: int, weights: Iterator[Named]) -> bool:
        try:
            return self._stage(version, weights)
        finally:
            for _ in weights:  # consume the rest: the other ranks take part in gathering it
                pass

    @property
    def needs_republish(self) -> bool:
        return super().needs_republish or bool(self.stale_servers())

    def stale_servers(self) -> list[ServerControl]:
        """Return the servers that lack the newest version and can take it now, sorted by id."""
        servers = list(self._servers.values())
        stale = [server for server in servers if self._is_stale(server)]
        return sorted(stale, key=lambda server: server.id)

    def close(self) -> None:
        with suppress(RoleError):
            self._leave()
        super().close()

    async def update_server(self, server: ServerControl, version: int) -> None:
        """Check that the server could take a version; `stage` updates it."""
        if not server.can.distributed or server.can.dp != 1:
            raise RoleError(
                f"{server.address} cannot join a process group (dp {server.can.dp}); "
                "use publisher.type=disk, or dp=1"
            )
        await server.version()
        server.error = None

    def _is_stale(self, server: ServerControl) -> bool:
        is_behind = self.newest is not None and server.confirmed_version != self.newest
        is_healthy = server.capabilities is not None and server.error is None
        return is_behind and is_healthy and time.monotonic() >= server.retry_at

    def _stage(self, version: int, weights: Iterator[Named]) -> bool:
        begin = time.perf_counter()
        if not self.shapes:  # check all tensors before the first is sent
            for _ in self.checked(weights):
                pass
            return True
        self.newest = version
        buckets = pack(self.checked(weights), self.config.bucket_mb << 20)
        first = next(buckets)
        self.call(self.push_all(version))
        servers = self.stale_servers()
        if not servers:
            return False
        until = time.monotonic() + self.config.timeout_s
        try:
            self._join(servers, first.tensors[0].device.type, until)
            self.stage_s = time.perf_counter() - begin
            self._update(servers, version, itertools.chain([first], buckets))
        except PartialUpdate:
            self._leave()
        return all(server.confirmed_version != version for server in servers)

    def _update(self, servers: Servers, version: int, buckets: Iterator[Bucket]) -> None:
        """Pause the servers, send all buckets, and continue the servers.

        Raises:
            PartialUpdate: A server failed.
        """
        update = ServersUpdate(self, servers, version)
        locks = AsyncExitStack()
        try:
            self.call(_lock(locks, servers))
            self.call(update.pause())
            self._send(buckets, version, update)
            self.call(update.finish())
        finally:
            self.call(locks.aclose())

    def _send(self, buckets: Iterator[Bucket], version: int, update: ServersUpdate) -> None:
        """Send every bucket while the next one is gathered.

        Raises:
            PartialUpdate: A server did not receive a bucket.
        """

        async def begin(server: ServerControl) -> None:
            await server.begin(self.shapes)

        self.call(update.send(begin))
        *_, last_name = self.shapes
        wait_for_last: Callable[[], None] | None = None
        for bucket in buckets:
            if wait_for_last is not None:
                wait_for_last()
            is_last_bucket = bucket.layout.names[-1] == last_name
            label = version if is_last_bucket else None
            wait_for_last = self._broadcast(bucket, label, update)
        if wait_for_last is not None:
            wait_for_last()

    # ------------------------------------------------------------ the process group

    def _join(self, servers: Servers, device: str, until: float) -> None:
        """Create a group with these servers, unless it exists.

        Args:
            servers: The other ranks.
            device: Type of the device that holds the tensors.
            until: Deadline of the servers' answers, in monotonic seconds.

        Raises:
            PartialUpdate: Some servers did not join.
            RoleError: The port is taken.
        """
        if self._group is not None and self.members == servers:
            return
        self._leave()
        self.group_name = f"arealite-{secrets.token_hex(8)}"
        self._backend = self.config.distributed.backend
        if self._backend == "auto":
            self._backend = "nccl" if device == "cuda" else "gloo"
        listener = self._listen()
        _, port, *_ = listener.getsockname()
        world_size = 1
        rank_offsets: dict[ServerControl, int] = {}
        for server in servers:
            rank_offsets[server] = world_size
            world_size += server.can.tp
        group = WeightGroup(
            master_address=self.host,
            master_port=port,
            world_size=world_size,
            group_name=self.group_name,
            backend=self._backend,
            timeout_s=self.config.timeout_s,
        )

        async def join(server: ServerControl) -> None:
            await server.join_group(group, rank_offsets[server])

        posted = self.submit(self.on_all(servers, until, join))
        joined = self._join_as_first(listener, world_size)
        wait([posted, joined], return_when=FIRST_COMPLETED)
        posted.result()
        try:
            self._group = joined.result()
            self.members = servers
        except (RuntimeError, OSError) as error:
            raise RoleError(f"no group of {len(servers)} servers was formed: {error}") from error
        logger.info(
            "weight group formed",
            servers=[server.id for server in servers],
            backend=self._backend,
        )

    def _join_as_first(self, listener: socket.socket, world_size: int) -> Future[Any]:
        """Join the group as rank 0 in another thread; return a future of the group."""
        job = partial(
            groups.join,
            listener,
            self.group_name,
            rank=0,
            world_size=world_size,
            backend=self._backend,
            seconds=self.config.timeout_s,
        )
        joined: Future[Any] = Future()
        thread = threading.Thread(
            target=resolve,
            args=(joined, job),
            name="join group",
            daemon=True,  # the process does not wait for a job that may block for long
        )
        thread.start()
        return joined

    def _broadcast(
        self, bucket: Bucket, version: int | None, update: ServersUpdate
    ) -> Callable[[], None]:
        """Start to send a bucket; `version` comes with the last one.

        Returns:
            A function that waits until the servers have received the bucket. It raises
            PartialUpdate if one did not.
        """
        is_flat = self._backend == "nccl" and all(server.can.buckets for server in self.members)

        async def receive(server: ServerControl) -> None:
            await server.receive(
                vars(bucket.layout),
                self.group_name,
                is_flat=is_flat,
                version=version,
            )

        posted = self.submit(update.send(receive))
        tensors = [bucket.flat] if is_flat else bucket.tensors
        if self._backend == "gloo":
            tensors = [tensor.cpu() for tensor in tensors]  # no copy if they are on the CPU
        works: list[Any] = []
        with suppress(RuntimeError):  # a server has crashed; its request fails, too
            works = [
                dist.broadcast(tensor, src=0, group=self._group, async_op=True)
                for tensor in tensors
            ]

        def wait_until_received() -> None:
            posted.result()
            for work in works:
                work.wait()

        return wait_until_received

    def _leave(self) -> None:
        """Destroy the group, here and at the servers that respond."""
        group = self._group
        self._group = None
        if group is None:
            return
        with suppress(RuntimeError):
            dist.destroy_process_group(group)

        async def leave() -> None:
            requests = [
                server.leave_group(self.group_name)
                for server in self.members
                if server.error is None
            ]
            answers = Wait(event="servers to leave a group", owner="publisher", seconds=GRACE_S)
            with suppress(DeadlineError), answers:
                await asyncio.gather(*requests, return_exceptions=True)

        self.submit(leave()).result()

    def _listen(self) -> socket.socket:
        """Return a socket that listens for the servers at the address of rank 0."""
        port = self.config.distributed.port
        try:
            return socket.create_server((self.host, port))
        except OSError as error:
            raise RoleError(
                f"trainer.ppo.publisher.distributed.port={port} at cluster.host={self.host} "
                f"cannot be bound: {error}. Use another port, or 0 for any free port."
            ) from error


async def _lock(locks: AsyncExitStack, servers: Servers) -> None:
    """Take the locks of the servers; closing `locks` releases them."""
    for server in servers:
        await locks.enter_async_context(server.lock)
