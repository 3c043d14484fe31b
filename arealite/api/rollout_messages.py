"""What rollout workers and the datapipe say to each other over ZeroMQ.

On the wire a message is one msgpack frame followed by the raw payload frames it announces. Every
field says who fills it.
Delivery is at least once: each message may arrive twice, so each is idempotent by the id it
carries.
"""

from __future__ import annotations

import msgspec

from arealite.api.task import Task
from arealite.api.trajectory import Count, TrajectoryHeader


class Failure(msgspec.Struct, frozen=True):
    """Why an episode ended without trajectories. Filled by the collector."""

    failure_class: str
    detail: str


class EpisodeIds(msgspec.Struct, frozen=True):
    """The ids of one episode of a leased group. Filled by the worker."""

    lease_id: str
    group_id: str
    member: Count
    """Which of the group's episodes, 0 … group_size - 1."""


class Episode(EpisodeIds, frozen=True):
    """The end of one episode of a leased group. Filled by the worker."""

    headers: list[TrajectoryHeader]
    """One a trainable seat that generated; [] exactly when `failure` is set. Their payloads follow
    as frames, in this order."""
    failure: Failure | None
    """None when the episode finished."""


class TurnHeader(msgspec.Struct, frozen=True):
    """One generation of an unfinished episode, whole or so far; a longer version replaces a shorter
    one. Filled by the worker; its payload (`episode.encode_turn`) follows as a frame."""

    member: Count
    seat: str
    index: Count
    """Which of the seat's generations in this episode, from 0."""
    oldest_version: Count
    """Of its tokens."""


# ---------------------------------------------------------------- worker → datapipe


class WorkerState(msgspec.Struct, frozen=True, tag=True):
    """Credit and sign of life, on connecting, after each result and at least once a second."""

    worker_id: str
    capacity: Count
    """Episodes the worker wants to have in hand; 0 while it drains."""
    held: list[str]
    """Lease ids it knows. A lease that the datapipe gave this process and that is missing here is
    sent again."""
    split_metrics: dict[str, float]
    """Counters since the worker's start (waits in seconds, interruptions, …); {} where it has
    none."""
    process: str
    """Tells a worker that was started again from the one before: what that one ran is lost."""


class Result(msgspec.Struct, frozen=True, tag=True):
    """Finished episodes; kept by the worker until they are acknowledged."""

    worker_id: str
    episodes: list[Episode]


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Turns of episodes that run on, kept in case their worker dies. Never acknowledged: what is
    lost is sampled again. Sent only for environments that are `resumable`."""

    worker_id: str
    lease_id: str
    group_id: str
    turns: list[TurnHeader]
    """Their payloads follow as frames, in this order."""


# ---------------------------------------------------------------- datapipe → worker


class Lease(msgspec.Struct, frozen=True, tag=True):
    """A task and which episodes of its group to run."""

    lease_id: str
    group_id: str
    split: str
    """"train", or "eval-<n>" for evaluation n."""
    task: Task
    members: list[Count]
    """The group's episodes still to be run, one each."""
    version: Count
    """No token may be older: the policy version that every server had confirmed when the lease was
    given, or the oldest of `turns` where that is less."""
    turns: list[TurnHeader] = []
    """Durable turns of these members from a worker that died, by member, seat and index; their
    payloads follow as frames. [] for a fresh group."""


class Ack(msgspec.Struct, frozen=True, tag=True):
    """The worker may forget a result: it is durable in the ledger, or it is unreadable and the
    datapipe gives its leases again."""

    checksum: int
    """`zlib.crc32` of the result's first frame; 0 answers a WorkerState."""


class Drain(msgspec.Struct, frozen=True, tag=True):
    """The run ends: finish nothing new, hand in what is finished, then exit with code 0."""

    reason: str


FromWorker = WorkerState | Result | Progress
ToWorker = Lease | Ack | Drain
