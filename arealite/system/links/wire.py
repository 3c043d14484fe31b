"""Sends typed messages over ZeroMQ: one msgpack frame, followed by raw payload frames.

The event loop watches a plain ZeroMQ socket. zmq.asyncio creates a future for each message, which
costs more than the message itself.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import cast

import msgspec
import zmq
from zmq.utils import z85

from arealite.api.rollout_messages import FromWorker, ToWorker
from arealite.api.trainer_messages import FromTrainer, ToTrainer
from arealite.system.names.name_registry import Secret

READ_SLICE_S = 0.005
"""Maximum time for which one callback reads messages before other tasks run."""
STOP_WAITING = "a rank was asked to stop while it waited"
"""Reason of a Finish that ends only the waits: a checkpoint and a last Finish follow it."""

ENVELOPE = 64
"""Largest number of bytes that CURVE adds to a frame."""

MISMATCH = "the two processes have different secrets: one has none, an old one, or another trial's"
REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

Context = zmq.Context[zmq.Socket[bytes]]
ToDatapipe = FromWorker | FromTrainer
encode = msgspec.msgpack.Encoder().encode
decode_to_datapipe: Callable[[bytes], ToDatapipe] = msgspec.msgpack.Decoder(ToDatapipe).decode
decode_to_worker: Callable[[bytes], ToWorker] = msgspec.msgpack.Decoder(ToWorker).decode
decode_to_trainer: Callable[[bytes], ToTrainer] = msgspec.msgpack.Decoder(ToTrainer).decode


def request_name(request: FromTrainer) -> str:
    """Return the name of a request in its answers: its type, and its step, version or id."""
    words = [type(request).__name__]
    for field in ("step", "version", "eval_id"):
        if hasattr(request, field):
            words.append(str(getattr(request, field)))
    return " ".join(words)


def open_socket(
    context: Context | None,
    kind: int,
    secret: Secret | None = None,
    *,
    max_mb: int = 0,
) -> zmq.Socket[bytes]:
    """Create a socket that never blocks in send and drops unsent messages when it is closed.

    Queues are unbounded: credit limits the messages in flight, and results are resent until they
    are acknowledged. With a secret, messages are encrypted (CURVE, https://rfc.zeromq.org/spec/26).
    A peer needs the ROUTER's public key to connect. No message contains that key; it is derived
    from the secret.

    Args:
        context: The ZeroMQ context; None: the process's shared context.
        kind: zmq.ROUTER or zmq.DEALER.
        secret: The run's secret; None: no encryption.
        max_mb: A peer that sends a larger frame is disconnected before the frame is in memory.
            0 sets no limit: ranks receive only frames that passed the datapipe's limit.
    """
    if context is None:
        context = cast(Context, zmq.Context.instance())
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    max_bytes = (max_mb << 20) + ENVELOPE if max_mb else -1
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    if secret is not None:
        _encrypt(socket, kind, secret)
        socket.get_monitor_socket(REFUSALS)
    return socket


def _encrypt(
    socket: zmq.Socket[bytes],
    kind: int,
    secret: Secret,
) -> None:
    """Set the keys of a ROUTER or DEALER."""
    router_key = z85.encode(secret.derive("zmq router"))
    if kind == zmq.ROUTER:
        socket.curve_server = True
        socket.curve_secretkey = router_key
        return
    dealer_key = z85.encode(secret.derive("zmq dealer"))
    socket.curve_serverkey = zmq.curve_public(router_key)
    socket.curve_secretkey = dealer_key
    socket.curve_publickey = zmq.curve_public(dealer_key)


def count_refused(socket: zmq.Socket[bytes]) -> int:
    """Count connections refused since the last call: the peer has another secret, or none."""
    monitor = _monitor(socket)
    count = 0
    while monitor is not None and monitor.poll(0):
        monitor.recv_multipart()
        count += 1
    return count


def close(socket: zmq.Socket[bytes], *, linger_ms: int) -> None:
    """Close a socket; wait at most `linger_ms` for sent messages to leave."""
    monitor = _monitor(socket)
    if monitor is not None:
        socket.disable_monitor()
        monitor.close(0)
    socket.close(linger=linger_ms)


def _monitor(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes] | None:
    return getattr(socket, "_monitor_socket", None)


class Channel:
    """A socket in the running event loop: a callback receives frames, and sends never block."""

    def __init__(self, socket: zmq.Socket[bytes], on_frames: Callable[[list[bytes]], None]) -> None:
        self.socket = socket
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._scheduled_read: asyncio.Handle | None = None
        self._loop.add_reader(self._fd, self._read)
        self._schedule_read()

    def send(self, frames: Sequence[bytes]) -> None:
        """Send frames; they are dropped if no peer is connected, and their sender resends them."""
        with suppress(zmq.Again):
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        self._schedule_read()  # a send may consume the descriptor's read event

    def close(self, *, linger_ms: int = 0) -> None:
        """Stop reading and close the socket; wait at most `linger_ms` for sent frames to leave."""
        if not self.socket.closed:
            self._loop.remove_reader(self._fd)
            if self._scheduled_read is not None:
                self._scheduled_read.cancel()
            close(self.socket, linger_ms=linger_ms)

    def _schedule_read(self) -> None:
        if self._scheduled_read is None:
            self._scheduled_read = self._loop.call_soon(self._read)

    def _read(self) -> None:
        if self._scheduled_read is not None:
            self._scheduled_read.cancel()
            self._scheduled_read = None
        end = time.monotonic() + READ_SLICE_S
        while time.monotonic() < end:
            if self.socket.closed:
                return
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_frames(frames)
        self._schedule_read()
