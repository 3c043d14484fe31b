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

from arealite.api.rollout_messages import FromWorker, ToWorker
from arealite.api.trainer_messages import FromTrainer, ToTrainer

TURN_S = 0.005
"""How long messages are handled before the loop gets its turn."""
STOP_WAITING = "a rank was asked to stop while it waited"
"""Reason of a Finish that ends waits, but a checkpoint and a last Finish follow."""

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


def open_socket(context: Context | None, kind: int) -> zmq.Socket[bytes]:
    """Make a socket that never blocks in send and drops what is unsent when closed.

    Queues are unbounded because credit bounds what is in flight, and acknowledgements, not queues,
    keep results safe.
    """
    socket = (context or cast(Context, zmq.Context.instance())).socket(kind)
    for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, 0)
    return socket


class Channel:
    """A socket in the running event loop: frames come in through a callback, sends never wait."""

    def __init__(self, socket: zmq.Socket[bytes], on_frames: Callable[[list[bytes]], None]) -> None:
        self.socket = socket
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._again: asyncio.Handle | None = None
        self._loop.add_reader(self._fd, self._read)
        self._soon()

    def send(self, frames: Sequence[bytes]) -> None:
        """Hand frames to ZeroMQ; those without a peer are lost (who needs them sends again)."""
        with suppress(zmq.Again):
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        self._soon()  # sending may swallow the edge that tells of messages to read

    def close(self, *, linger_ms: int = 0) -> None:
        """Stop reading and close the socket, giving sent frames `linger_ms` to leave."""
        if not self.socket.closed:
            self._loop.remove_reader(self._fd)
            if self._again is not None:
                self._again.cancel()
            self.socket.close(linger=linger_ms)

    def _soon(self) -> None:
        if self._again is None:
            self._again = self._loop.call_soon(self._read)

    def _read(self) -> None:
        if self._again is not None:
            self._again.cancel()
            self._again = None
        end = time.monotonic() + TURN_S
        while time.monotonic() < end:
            if self.socket.closed:
                return
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_frames(frames)
        self._soon()
