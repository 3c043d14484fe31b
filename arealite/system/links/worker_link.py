"""Connects a rollout worker to the datapipe: receives leases, resends results until acknowledged.

The link reconnects to a restarted datapipe by itself; the worker needs no code for that.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import zmq

from arealite.api import rollout_messages as messages
from arealite.api.payloads import Payload, to_frames
from arealite.api.rollout_messages import Episode, Failure, Lease, Progress, TurnHeader, WorkerState
from arealite.api.turns import digest
from arealite.base import log
from arealite.base.errors import RoleError
from arealite.system.health.waits import Wait
from arealite.system.links import wire
from arealite.system.names.name_registry import Secret

logger = log.get(__name__)

STATE_S = 0.5
"""Interval of the WorkerState messages."""
SILENT_S = 2.0
"""After this long without an answer to a WorkerState, the address is resolved again."""
RESEND_S = 5.0
"""A result that is not acknowledged for this long is resent."""


@dataclass(kw_only=True)
class _Unacknowledged:
    """A sent result that is not acknowledged."""

    frames: list[bytes]
    episodes: list[Episode]
    sent: float = field(default_factory=time.monotonic)


EpisodeTurns = tuple[Lease, list[TurnHeader], list[bytes]]
"""Turns of one episode: its lease, headers and payloads."""


@dataclass(eq=False, kw_only=True)
class WorkerLink:
    """The connection of one worker. `capacity` counts episodes: a lease of m members uses m."""

    resolve: Callable[[], str | None]
    """Returns the datapipe's address; None: not known yet."""
    worker_id: str
    capacity: int
    context: wire.Context | None = None
    secret: Secret | None = None
    silence_s: float = 120.0
    max_frame_mb: int = 64

    def __post_init__(self) -> None:
        self.metrics: Callable[[], dict[str, float]] = dict[str, float]
        """Set by the worker: returns the counters to send as `split_metrics`."""
        self.progress: Callable[[bool], Iterable[EpisodeTurns]] = lambda is_new_connection: ()
        """Set by the worker: returns the unsent turns of running episodes. For a new connection it
        returns all their turns: a datapipe that died may have lost them."""
        self._channel: wire.Channel | None = None
        self._address = ""
        now = time.monotonic()
        self._received_at = now
        self._connected_at = now
        self._leases: asyncio.Queue[Lease | None] = asyncio.Queue()
        self._members: dict[str, set[int]] = {}
        self._turns: dict[str, list[bytes]] = {}
        """By lease id: payloads of `Lease.turns`, until `take_turns` returns them."""
        self._outbox: list[tuple[Episode, list[Payload]]] = []
        self._unacknowledged: dict[bytes, _Unacknowledged] = {}
        """Results by the digest of their first frame."""
        self._process = uuid.uuid4().hex[:8]
        self._is_draining = False
        self._wake = asyncio.Event()
        self._wait: Wait | None = None

    # ------------------------------------------------------------ called by the worker

    async def next_lease(self) -> Lease | None:
        """Wait for a lease, without a deadline; return None once the run ends."""
        self._wait = Wait(
            event="a lease",
            owner=self.worker_id,
            on="datapipe-0",
            replies_soon=True,
        )
        with self._wait:
            lease = await self._leases.get()
        if lease is None:
            self._leases.put_nowait(None)
        return lease

    def take_turns(self, lease: Lease) -> list[bytes]:
        """Return and remove the payloads of `lease.turns`."""
        return self._turns.pop(lease.lease_id, [])

    def submit(self, episode: Episode, payloads: list[Payload]) -> None:
        """Send a finished episode; resend it until it is acknowledged.

        Args:
            episode: Headers, or a failure.
            payloads: One for each header. An episode with a payload above `max_frame_mb` is sent
                as a failure.
        """
        largest = max([payload.size for payload in payloads], default=0)
        if largest > self.max_frame_mb << 20:
            failure = Failure(
                failure_class="too_large", detail=f"above datapipe.max_frame_mb={self.max_frame_mb}"
            )
            payloads = []
            episode = Episode(
                lease_id=episode.lease_id,
                group_id=episode.group_id,
                member=episode.member,
                headers=[],
                failure=failure,
            )
        self._remove_member(episode)
        self._outbox.append((episode, payloads))
        if len(self._outbox) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _remove_member(self, episode: Episode) -> None:
        """Remove a finished episode from its lease; remove the lease if it was the last."""
        members = self._members.get(episode.lease_id)
        if not members:
            return
        members.discard(episode.member)
        if not members:
            del self._members[episode.lease_id]

    def drain(self) -> None:
        """Drop the unfinished leases; `run` returns once all results are acknowledged."""
        self._is_draining = True
        self._members.clear()
        self._leases.put_nowait(None)
        self._wake.set()

    @property
    def unacknowledged(self) -> list[Episode]:
        """The submitted episodes that are not acknowledged."""
        episodes = [
            episode for entry in self._unacknowledged.values() for episode in entry.episodes
        ]
        episodes += [episode for episode, _ in self._outbox]
        return episodes

    # ------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Serve the connection; return after a drain, once all results are acknowledged.

        Raises:
            RoleError: no message of a datapipe arrived for `silence_s`.
        """
        try:
            while not self._is_done():
                await self._tick()
                self._wake.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), STATE_S)
            self._send_state()
        finally:
            if self._channel is not None:
                self._channel.close(linger_ms=1000)

    async def _tick(self) -> None:
        now = time.monotonic()
        silent_s = now - self._received_at
        if silent_s > self.silence_s:
            raise RoleError(f"{self.worker_id}: no message of a datapipe for {silent_s:.0f} s")
        is_silent = now - max(self._received_at, self._connected_at) > SILENT_S
        is_new_connection = self._channel is None or is_silent
        if is_new_connection:
            await self._connect()
        self._send_state()
        self._send_progress(is_new_connection)
        self._resend(older_than_s=RESEND_S)

    async def _connect(self) -> None:
        address = await asyncio.to_thread(self.resolve)
        if address is None:
            return
        if self._channel is not None:
            if wire.count_refused(self._channel.socket):
                logger.warning(
                    "no connection to the datapipe",
                    address=address,
                    why=wire.MISMATCH,
                )
            self._channel.close()
            if address != self._address:
                logger.info("datapipe moved", address=address, before=self._address)
        socket = wire.open_socket(
            self.context,
            zmq.DEALER,
            self.secret,
            max_mb=self.max_frame_mb,
        )
        socket.connect(address)
        self._address = address
        self._connected_at = time.monotonic()
        self._channel = wire.Channel(socket, self._receive)
        self._resend(older_than_s=0.0)

    def _is_done(self) -> bool:
        return self._is_draining and not (self._members or self.unacknowledged)

    # ------------------------------------------------------------ sending

    def _send_state(self) -> None:
        lease_ids = {*self._members}
        lease_ids.update(episode.lease_id for episode in self.unacknowledged)
        state = WorkerState(
            worker_id=self.worker_id,
            capacity=0 if self._is_draining else self.capacity,
            held=sorted(lease_ids),
            split_metrics=self.metrics(),
            process=self._process,
        )
        if self._channel is not None:
            self._channel.send([wire.encode(state)])

    def _send_progress(self, is_new_connection: bool) -> None:
        if self._channel is None:
            return
        for lease, turns, payloads in self.progress(is_new_connection):
            progress = Progress(
                worker_id=self.worker_id,
                lease_id=lease.lease_id,
                group_id=lease.group_id,
                turns=turns,
            )
            self._channel.send([wire.encode(progress), *payloads])

    def _flush(self) -> None:
        outbox = self._outbox
        self._outbox = []
        episodes: list[Episode] = []
        payloads: list[Payload] = []
        for episode, episode_payloads in outbox:
            episodes.append(episode)
            payloads += episode_payloads
        prompts, payload_frames = to_frames(payloads)
        message = messages.Result(worker_id=self.worker_id, episodes=episodes, prompts=prompts)
        result = wire.encode(message)
        frames = [result, *payload_frames]
        self._unacknowledged[digest(result)] = _Unacknowledged(frames=frames, episodes=episodes)
        if self._channel is not None:
            self._channel.send(frames)

    def _resend(self, *, older_than_s: float) -> None:
        now = time.monotonic()
        for entry in self._unacknowledged.values():
            if self._channel is not None and now - entry.sent >= older_than_s:
                entry.sent = now
                self._channel.send(entry.frames)

    # ------------------------------------------------------------ receiving

    def _receive(self, frames: list[bytes]) -> None:
        self._received_at = time.monotonic()
        if self._wait is not None:
            self._wait.last_sign = self._received_at
        match wire.decode_to_worker(frames[0]):
            case messages.Ack(digest=acknowledged):
                self._unacknowledged.pop(acknowledged, None)
            case Lease() as lease:
                self._take_lease(lease, frames[1:])
            case messages.Drain(reason=reason):
                if not self._is_draining:
                    logger.info("draining", reason=reason)
                    self._is_draining = True
                    self._leases.put_nowait(None)
        if self._is_done():
            self._wake.set()

    def _take_lease(self, lease: Lease, turn_payloads: list[bytes]) -> None:
        if self._is_draining:
            return
        self._members[lease.lease_id] = set(lease.members)
        if lease.turns:
            self._turns[lease.lease_id] = turn_payloads
        self._leases.put_nowait(lease)
