"""Simulates a network of ROUTER and DEALER sockets (ZeroMQ over TCP) with faults.

A connection preserves the order of its messages; there is no order between connections. Messages
sent before a death or a close may still arrive, possibly late. A reset connection loses messages in
transit and reconnects with a new route. Sends never block and never fail.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from tests.simulation.loop import ROOT, Process, VirtualLoop, current

Frames = list[bytes]


@dataclass
class Faults:
    """Current latency and fault rates."""

    latency_s: float = 0.0005
    jitter: float = 1.0
    """Sigma of the lognormal factor on the latency."""
    loss: float = 0.0
    duplicates: float = 0.0


@dataclass(eq=False)
class Connection:
    """The connection of one DEALER to an address."""

    dealer: SimSocket
    address: str
    number: int
    route: bytes | None = None
    """Route at the ROUTER; None until it received a message."""
    blocked_until: dict[str, float] = field(default_factory=lambda: {"up": 0.0, "down": 0.0})
    """By direction: time before which no message arrives, because TCP retransmits."""
    last: dict[str, float] = field(default_factory=lambda: {"up": 0.0, "down": 0.0})
    on_way: list[Any] = field(default_factory=list)
    waiting: list[Frames] = field(default_factory=list)
    """Messages sent before a socket binds the address."""


class Network:
    """All sockets of a simulation."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.faults = Faults()
        self.process = Process("network")
        self.routers: dict[str, SimSocket] = {}
        self.sockets: list[SimSocket] = []
        self.connections: list[Connection] = []
        self.counts: Counter[str] = Counter()
        self.down = False
        """Set at the end of the seed: no further message is delivered."""
        self.on_send: Callable[[SimSocket, Frames], None] = lambda socket, frames: None
        self.trace: Callable[[str, SimSocket, Frames], None] = lambda what, socket, frames: None
        self._routes = 0
        self._numbers = 0
        self._addresses = 0
        self._last_address = ""

    def open_socket(
        self, context: Any, kind: int, secret: None = None, *, max_mb: int = 0
    ) -> SimSocket:
        """Replace `wire.open_socket`."""
        socket = SimSocket(self, kind, current.get(ROOT))
        self.sockets.append(socket)
        return socket

    def new_address(self) -> str:
        """Return a new address, or sometimes that of the last ROUTER if it is free."""
        reused = self._last_address and self._last_address not in self.routers
        if not reused or self.rng.random() < 0.7:
            self._addresses += 1
            self._last_address = f"sim://datapipe:{self._addresses}"
        return self._last_address

    # ------------------------------------------------------------ carrying

    def up(self, connection: Connection, frames: Frames) -> None:
        self.counts["messages"] += 1
        if connection.address not in self.routers:
            connection.waiting.append(frames)  # ZeroMQ keeps the message until a peer is connected
            return
        self._carry(connection, "up", frames)

    def down_to(self, router: SimSocket, frames: Frames) -> None:
        self.counts["messages"] += 1
        route = frames[0]
        for connection in self.connections:
            if connection.route == route and connection.address == router.address:
                self._carry(connection, "down", frames[1:])
                return
        self.counts["unroutable"] += 1

    def _carry(self, connection: Connection, way: str, frames: Frames) -> None:
        faults, rng, now = self.faults, self.rng, self.loop.now
        if self.down:
            return
        if faults.loss and rng.random() < faults.loss:
            self.counts["lost"] += 1
            return
        copies = 1 + (rng.random() < faults.duplicates if faults.duplicates else 0)
        self.counts["duplicated"] += copies - 1
        for _ in range(copies):
            delay = faults.latency_s * rng.lognormvariate(0.0, faults.jitter)
            at = max(now + delay, connection.blocked_until[way], connection.last[way])
            connection.last[way] = at
            router = self.routers.get(connection.address)
            entry = [connection, way, frames, router, None]
            entry[4] = self.loop.call_at(at, self._arrive, entry, context=self.process.context)
            connection.on_way.append(entry)

    def _arrive(self, entry: list[Any]) -> None:
        connection, way, frames, sent_to, _ = entry
        connection.on_way.remove(entry)
        if self.down:
            return
        if way == "down":
            connection.dealer.deliver(frames)
            return
        router = self.routers.get(connection.address)
        if router is None or router is not sent_to:  # another process under an old address
            self.counts["lost"] += 1
            return
        if connection.route is None:
            self._routes += 1
            connection.route = b"r%d" % self._routes
        router.deliver([connection.route, *frames])

    # ------------------------------------------------------------ faults of sockets

    def connect(self, dealer: SimSocket, address: str) -> Connection:
        self._numbers += 1
        connection = Connection(dealer, address, self._numbers)
        self.connections.append(connection)
        return connection

    def bind(self, router: SimSocket) -> None:
        self.routers[router.address] = router
        for connection in self.connections:
            if connection.address == router.address:
                waiting, connection.waiting = connection.waiting, []
                for frames in waiting:
                    self._carry(connection, "up", frames)

    def close(self, socket: SimSocket, *, flushes: bool) -> None:
        """Remove a socket; its sent messages, or only a part of them, still arrive."""
        self.sockets.remove(socket)
        if socket.kind == zmq.ROUTER:
            if self.routers.get(socket.address) is socket:
                del self.routers[socket.address]
            for connection in self.connections:
                if connection.address == socket.address:
                    self._cut(connection, "up", keep=0.0)
                    self._cut(connection, "down", keep=1.0 if flushes else self.rng.random())
                    connection.route = None
        elif (connection := socket.connection) is not None and connection in self.connections:
            self._cut(connection, "up", keep=1.0 if flushes else self.rng.random())
            self._cut(connection, "down", keep=0.0)
            self.connections.remove(connection)

    def kill(self, process: Process) -> None:
        """Close the sockets of a dead process; only a part of their messages is flushed."""
        for socket in [s for s in self.sockets if s.process is process]:
            socket.closed = True
            self.close(socket, flushes=False)

    def reset(self, connection: Connection) -> None:
        """Reset a connection: messages in transit are lost, and the DEALER reconnects."""
        self.counts["resets"] += 1
        self._cut(connection, "up", keep=0.0)
        self._cut(connection, "down", keep=0.0)
        connection.route = None

    def block(self, connection: Connection, seconds: float, ways: Sequence[str]) -> None:
        """Delay all messages of a connection without an error at either end."""
        self.counts["partitions"] += 1
        until = self.loop.now + seconds
        connection.blocked_until.update(dict.fromkeys(ways, until))
        for entry in [entry for entry in connection.on_way if entry[1] in ways]:
            entry[4].cancel()
            way = entry[1]
            connection.last[way] = at = max(until, connection.last[way])
            entry[4] = self.loop.call_at(at, self._arrive, entry, context=self.process.context)

    def _cut(self, connection: Connection, way: str, *, keep: float) -> None:
        mine = [entry for entry in connection.on_way if entry[1] == way]
        for entry in mine[round(keep * len(mine)) :]:
            entry[4].cancel()
            connection.on_way.remove(entry)
            self.counts["lost"] += 1


class SimSocket:
    """Replaces zmq.Socket for `wire.Channel` and TrainerLink."""

    def __init__(self, network: Network, kind: int, process: Process) -> None:
        self.network = network
        self.kind = kind
        self.process = process
        self.address = ""
        self.connection: Connection | None = None
        self.closed = False
        self.on_frames: Callable[[Frames], None] | None = None
        self.inbox: deque[Frames] = deque()
        self._arrived: asyncio.Future[None] | None = None

    def bind(self, address: str) -> None:
        self.address = self.network.new_address()
        self.network.bind(self)

    def getsockopt(self, option: int) -> bytes:
        return self.address.encode()

    def connect(self, address: str) -> None:
        self.address = address
        self.connection = self.network.connect(self, address)

    def send(self, frame: bytes, flags: int = 0) -> None:
        self.send_multipart([frame])

    def send_multipart(self, frames: Sequence[bytes], *args: Any, **kwargs: Any) -> None:
        if self.closed or self.process.dead:
            return
        kept = [bytes(frame) for frame in frames]
        self.network.on_send(self, kept)
        if self.closed or self.process.dead:  # killed at this very message
            return
        self.network.trace("send", self, kept)
        if self.connection is not None:
            self.network.up(self.connection, kept)
        else:
            self.network.down_to(self, kept)

    def deliver(self, frames: Frames) -> None:
        """Deliver a message to the owner once its process runs."""
        if self.closed or self.process.dead:
            return
        self.network.loop.call_soon(self._take, frames, context=self.process.context)

    def _take(self, frames: Frames) -> None:
        if self.closed:
            return
        self.network.trace("recv", self, frames)
        if self.on_frames is not None:
            self.on_frames(frames)
        else:
            self.inbox.append(frames)
            _set(self._arrived)

    async def poll(self, ms: float) -> bool:
        """Wait for a message as zmq's poll does, without blocking the event loop."""
        if not self.inbox and ms > 0:
            loop = self.network.loop
            self._arrived = arrived = loop.create_future()
            timer = loop.call_later(ms / 1000, _set, arrived)
            try:
                await arrived
            finally:
                timer.cancel()
        return bool(self.inbox)

    def recv_multipart(self) -> Frames:
        return self.inbox.popleft()

    def close(self, linger: int = 0) -> None:
        if not self.closed:
            self.closed = True
            if not self.process.dead and not self.network.down:
                self.network.close(self, flushes=linger > 0)


class SimChannel:
    """Replaces `wire.Channel`."""

    def __init__(self, socket: SimSocket, on_frames: Callable[[Frames], None]) -> None:
        self.socket = socket
        socket.on_frames = on_frames

    def send(self, frames: Sequence[bytes]) -> None:
        self.socket.send_multipart(frames)

    def close(self, *, linger_ms: int = 0) -> None:
        self.socket.close(linger=linger_ms)


def _set(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)


def checksum(frames: Sequence[bytes], start: int) -> int:
    """Add frames to a running checksum."""
    for frame in frames:
        start = zlib.crc32(frame, start)
    return start
