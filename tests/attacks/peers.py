"""Raw peers: ZeroMQ sockets with and without the secret, and forged results."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import numpy as np
import zmq
from zmq.utils import z85

from arealite.api.payloads import Payload
from arealite.api.rollout_messages import Ack, Episode, Lease, ToWorker, WorkerState
from arealite.api.trainer_messages import ToTrainer
from arealite.api.trajectory import TrajectoryHeader, TurnNode
from arealite.api.turns import digest
from arealite.system.links import wire
from arealite.system.links.worker_link import STATE_S
from arealite.system.names.name_registry import Secret
from tests.attacks.conftest import Live
from tests.e2e.conftest import SLOW_S
from tests.payloads import pack, result_frames
from tests.system.scenes import header
from tests.waiting import until

PATIENCE_MS = 60_000
MARKER = [7, 9, 8, 11, 10, 13, 12, 9]
"""Tokens of forged trajectories. No honest prompt begins with them."""
GUESS = Secret(key=b"guess" * 6 + b"!!")

decode = msgspec.msgpack.Decoder(ToWorker | ToTrainer).decode
Message = TypeVar("Message")


class Insider:
    """A peer with the secret that acts as a worker or a trainer and sends any message."""

    def __init__(self, live: Live, worker_id: str) -> None:
        self.live, self.worker_id = live, worker_id
        self.context: wire.Context = zmq.Context()
        self.socket = wire.open_socket(self.context, zmq.DEALER, live.secret)
        self.socket.connect(live.datapipe)
        self.leases: list[Lease] = []
        self._sent_state_at = -math.inf

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def send_message(self, message: msgspec.Struct, *payloads: bytes) -> None:
        self.send(wire.encode(message), *payloads)

    def receive(self, kind: type[Message]) -> Message:
        """Return the next message of a type; keep leases and drop other messages."""
        while True:
            assert self.socket.poll(PATIENCE_MS), f"no {kind.__name__}\n{self.live.shown}"
            message = decode(self.socket.recv_multipart()[0])
            self._take(message)
            if isinstance(message, kind):
                return message

    def submit(self, episodes: list[Episode], *payloads: Payload) -> None:
        """Send a result and wait until it is acknowledged."""
        result, frames = result_frames(self.worker_id, episodes, payloads)
        frame = wire.encode(result)
        self.send(frame, *frames)
        self.acknowledged(frame)

    def acknowledged(self, frame: bytes) -> None:
        """Wait until a message is acknowledged."""
        while self.receive(Ack).digest != digest(frame):
            pass

    def wait_until_handled(self) -> None:
        """Return once the datapipe has handled all sent messages, which keep their order."""
        self.submit([])

    def state(self, capacity: int, **changes: Any) -> WorkerState:
        held = [lease.lease_id for lease in self.leases]
        made = WorkerState(
            worker_id=self.worker_id,
            capacity=capacity,
            held=held,
            split_metrics={},
            process=f"p-{self.worker_id}",
        )
        return msgspec.structs.replace(made, **changes)

    def episode(self) -> tuple[Lease, int]:
        """Return a lease of one episode for this worker; all earlier leases have results."""
        self.leases.clear()
        self._sent_state_at = -math.inf
        until(self._has_lease, what=lambda: f"a lease\n{self.live.shown}", seconds=SLOW_S)
        lease = self.leases[0]
        self.send_message(
            self.state(0, held=[lease.lease_id])
        )  # no further leases: the run would wait for them
        return lease, lease.members[0]

    def _has_lease(self) -> bool:
        """Send heartbeats as a worker does, and check for a lease."""
        if time.monotonic() - self._sent_state_at > STATE_S:
            self._sent_state_at = time.monotonic()
            self.send_message(self.state(1))
        while self.socket.poll(0):
            self._take(decode(self.socket.recv_multipart()[0]))
        return bool(self.leases)

    def _take(self, message: Any) -> None:
        if isinstance(message, Lease) and message not in self.leases:
            self.leases.append(message)

    def close(self) -> None:
        """Return leases, as a draining worker does."""
        self.send_message(self.state(0, held=[]))
        self.wait_until_handled()
        wire.close(self.socket, linger_ms=0)
        self.context.term()


@contextmanager
def insider(live: Live, worker_id: str = "insider") -> Iterator[Insider]:
    peer = Insider(live, worker_id)
    try:
        yield peer
    finally:
        peer.close()


def forged(group: str, member: int, *, version: int = 0, reward: float = 1.0) -> Forgery:
    """Return a valid trajectory of an episode, which a test then changes."""
    return Forgery(group, member, version, reward)


class Forgery:
    """A trajectory's header, prompt and turn, whose fields a test changes."""

    def __init__(self, group: str, member: int, version: int, reward: float) -> None:
        self.ids = (group, member)
        length = len(MARKER)
        sampled = length // 2
        self.prompt = np.array(MARKER[:-sampled], "<i4").tobytes()
        self.turn = TurnNode(
            parent=-1,
            shared=length - sampled,
            added=b"",
            ids=np.array(MARKER[-sampled:], "<i4").tobytes(),
            logprobs=np.full(sampled, -1.0, "<f4").tobytes(),
            versions=np.full(sampled, version, "<i4").tobytes(),
            reward=reward,
            temperature=1.0,
            reused=0,
            reason="first",
            prompt_digest=b"",
            answer_digest=b"",
        )
        self.header: TrajectoryHeader = header(
            group, member, version=version, reward=reward, tokens=length
        )
        self.more: list[TrajectoryHeader] = []

    def put(self, *, prompt: bytes | None = None, **fields: Any) -> Forgery:
        """Change the turn, and the prompt."""
        self.turn = msgspec.structs.replace(self.turn, **fields)
        if prompt is not None:
            self.prompt = prompt
        return self

    def say(self, **facts: Any) -> Forgery:
        """Change the header."""
        self.header = msgspec.structs.replace(self.header, **facts)
        return self

    def payload(self) -> Payload:
        return pack(self.prompt, [self.turn])

    def episode(self, lease_id: str) -> Episode:
        group_id, member = self.ids
        return Episode(
            lease_id=lease_id,
            group_id=group_id,
            member=member,
            headers=[self.header, *self.more],
            failure=None,
        )


def no_security(socket: zmq.Socket[bytes]) -> None:
    """A peer without CURVE."""


def own_keys(socket: zmq.Socket[bytes]) -> None:
    """A peer with its own CURVE keys and a guessed server key."""
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = zmq.curve_keypair()[0]


def wrong_secret(socket: zmq.Socket[bytes]) -> None:
    """A process of another trial."""
    router, dealer = (z85.encode(GUESS.derive(f"zmq {side}")) for side in ("router", "dealer"))
    socket.curve_serverkey = zmq.curve_public(router)
    socket.curve_secretkey, socket.curve_publickey = dealer, zmq.curve_public(dealer)


def plain_password(socket: zmq.Socket[bytes]) -> None:
    """A peer that offers ZeroMQ's PLAIN mechanism."""
    socket.plain_username, socket.plain_password = b"admin", b"admin"


STRANGERS = [no_security, own_keys, wrong_secret, plain_password]
