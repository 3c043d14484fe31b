"""Carries typed messages over ZeroMQ: one msgpack frame, then raw payload frames.

A plain socket watched by the event loop rather than zmq.asyncio, whose future per message costs
more than the message.
"""

from __future__ import annotations

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
from arealite.system.names.secret import Secret

READ_SLICE_S = 0.005
"""How long messages are handled before the loop gets its turn."""
STOP_WAITING = "a rank was asked to stop while it waited"
"""Reason of a Finish that ends waits, but a checkpoint and a last Finish follow."""

ENVELOPE = 64
"""Largest number of bytes that CURVE adds to a frame."""

SECRET_MISMATCH = (
    "the two processes have different secrets: one has none, an old one, or another trial's"
)
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
    """Name a request as its answers do: its type and the step or id it carries."""
    numbers = (getattr(request, name, "") for name in ("step", "version", "eval_id"))
    return " ".join([type(request).__name__, *(str(n) for n in numbers if n != "")])


def open_socket(
    context: Context | None, kind: int, secret: Secret | None = None, *, max_mb: int = 0
) -> zmq.Socket[bytes]:
    """Make a socket that never blocks in send and drops what is unsent when closed.

    Queues are unbounded because credit bounds what is in flight, and acknowledgements, not queues,
    keep results safe. With a secret, messages are encrypted (CURVE, https://rfc.zeromq.org/spec/26).
    A peer needs the ROUTER's public key to connect. No message contains that key; it is derived
    from the secret.

    A peer is disconnected before a frame larger than `max_mb` is in memory. 0 sets no limit: ranks
    receive only frames that the datapipe received within its limit.
    """
    socket = (context or cast(Context, zmq.Context.instance())).socket(kind)
    for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, (max_mb << 20) + ENVELOPE if max_mb else -1)
    if secret is not None:
        router, dealer = (z85.encode(secret.derive(f"zmq {side}")) for side in ("router", "dealer"))
        if kind == zmq.ROUTER:
            socket.curve_server, socket.curve_secretkey = True, router
        else:
            socket.curve_serverkey = zmq.curve_public(router)
            socket.curve_secretkey, socket.curve_publickey = dealer, zmq.curve_public(dealer)
        socket.get_monitor_socket(REFUSALS)
    return socket


def count_refused(socket: zmq.Socket[bytes]) -> int:
    """Return how many connections failed since the last call because the two sides have different
    secrets, or one has none."""
    monitor, count = _monitor(socket), 0
    while monitor is not None and monitor.poll(0):
        monitor.recv_multipart()
        count += 1
    return count


def close(socket: zmq.Socket[bytes], *, linger_ms: int) -> None:
    """Close a socket, giving sent messages `linger_ms` to leave."""
    if (monitor := _monitor(socket)) is not None:
        socket.disable_monitor()
        monitor.close(0)
    socket.close(linger=linger_ms)


def _monitor(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes] | None:
    return getattr(socket, "_monitor_socket", None)


class Channel:
    """A socket in the running event loop: frames come in through a callback, sends never wait."""

    def __init__(self, socket: zmq.Socket[bytes], on_frames: Callable[[list[bytes]], None]) -> None:
        self.socket = socket
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._scheduled_read: asyncio.Handle | None = None
        self._loop.add_reader(self._fd, self._read)
        self._schedule_read()

    def send(self, frames: Sequence[bytes]) -> None:
        """Hand frames to ZeroMQ; those without a peer are lost (who needs them sends again)."""
        with suppress(zmq.Again):
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        self._schedule_read()  # sending may swallow the edge that tells of messages to read

    def close(self, *, linger_ms: int = 0) -> None:
        """Stop reading and close the socket, giving sent frames `linger_ms` to leave."""
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
