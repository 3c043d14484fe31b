"""Messages between rollout workers and the datapipe, over ZeroMQ.

On the wire, a message is one msgpack frame and the raw payload frames that it announces. Delivery
is at least once: a message may arrive twice, and its id makes it idempotent. Each docstring names
the process that fills the message.
"""

import os
import re
import sysconfig
from traceback import FrameSummary, extract_tb
from typing import cast

import msgspec

from arealite.api.task import Task
from arealite.api.trajectory import Count, TrajectoryHeader
from arealite.base.errors import EpisodeError, InvariantError, UserError, failure_class


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why an episode has no trajectories. Filled by the collector."""

    failure_class: str
    detail: str


class EpisodeIds(msgspec.Struct, frozen=True, kw_only=True):
    """The ids of one episode of a leased group. Filled by the worker."""

    lease_id: str
    group_id: str
    member: Count
    """Number of the episode within its group, 0 … group_size - 1."""


class Episode(EpisodeIds, frozen=True, kw_only=True):
    """The result of one episode of a leased group. Filled by the worker."""

    headers: list[TrajectoryHeader]
    """One for each trainable seat that generated; [] exactly if `failure` is set."""
    failure: Failure | None
    """None if the episode finished."""


class TurnHeader(msgspec.Struct, frozen=True, kw_only=True):
    """One generation of an unfinished episode. Filled by the worker.

    The generation may be unfinished: a longer record replaces a shorter one. The payload
    (`episode.encode_turn`) follows as a frame.
    """

    member: Count
    seat: str
    index: Count
    """Number of the generation within its seat and episode, from 0."""
    oldest_version: Count
    """Smallest policy version of its tokens."""


# ---------------------------------------------------------------- worker → datapipe


class WorkerState(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Heartbeat and credit. Sent on connecting, after each result, and at least once a second."""

    worker_id: str
    capacity: Count
    """Largest number of episodes of this worker; 0 while it drains."""
    held: list[str]
    """Lease ids that the worker has. The datapipe resends a lease of this process that is
    missing here."""
    split_metrics: dict[str, float]
    """Counters since the worker's start (waits in seconds, interruptions, …); may be {}."""
    process: str
    """Unique id of the worker's process. A new id means that the worker was restarted and the
    episodes of the old process are lost."""


class Result(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Finished episodes. The worker keeps and resends them until they are acknowledged."""

    worker_id: str
    episodes: list[Episode]
    prompts: list[Count] = []
    """For each header of the episodes: the index of its prompt. The frames that follow are the
    prompts, then the turns of each header (`payloads.to_frames`)."""


class Progress(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Turns of unfinished episodes, from which another worker can resume them after a crash.

    Sent only for `resumable` environments and never acknowledged: lost turns are sampled again.
    """

    worker_id: str
    lease_id: str
    group_id: str
    turns: list[TurnHeader]
    """Their payloads follow as frames, in this order."""


# ---------------------------------------------------------------- datapipe → worker


class Lease(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The order to run some episodes of a group. Filled by the datapipe."""

    lease_id: str
    group_id: str
    split: str
    """"train", or "eval-<n>" for evaluation n."""
    task: Task
    members: list[Count]
    """Members (episodes) of the group to run."""
    version: Count
    """Oldest policy version that a token may have: the version that every server had confirmed at
    the time of the lease, or the oldest version of `turns` if that is smaller."""
    turns: list[TurnHeader] = []
    """Durable turns of these members from a crashed worker, by member, seat and index; their
    payloads follow as frames. [] for a new group."""


class Ack(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The worker may delete a result: it is durable in the ledger, or it is unreadable and the
    datapipe leases its episodes again. Filled by the datapipe."""

    digest: bytes
    """Digest of the result's first frame; b"" answers a WorkerState."""


class Drain(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The run ends: abandon unfinished episodes, send finished ones, and exit with code 0."""

    reason: str


FromWorker = WorkerState | Result | Progress
ToWorker = Lease | Ack | Drain


# ---------------------------------------------------------------- failures

MAX_DETAIL = 500
"""Characters of an error that a Failure keeps."""
PLACE = re.compile(r"\([^()]+:\d+\)\Z")
"""File and line at the end of a Failure's detail."""
LIBRARIES = tuple(
    sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
"""Folders of the standard library and of installed packages, in which no line is the user's."""
FATAL = (InvariantError, UserError)
"""Errors of the run, not of the episode."""


def make_failure(error: BaseException) -> Failure:
    """Return the failure of an episode whose environment or agent raised `error`.

    Its detail ends with file and line if the exception is not an EpisodeError.
    """
    detail = f"{type(error).__name__}: {error}"[:MAX_DETAIL]
    frames = list[FrameSummary]()
    if not isinstance(error, EpisodeError):
        frames += extract_tb(error.__traceback__)
    if frames:
        user_frames = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
        last_frame = (user_frames or frames)[-1]
        detail += f" ({last_frame.filename}:{last_frame.lineno})"
    return Failure(failure_class=failure_class(error), detail=detail)


def root_error(error: BaseException) -> BaseException:
    """Return the error inside an exception group: a fatal one if any, else the first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    group = cast(BaseExceptionGroup[BaseException], error)
    roots = [root_error(inner) for inner in group.exceptions]
    for root in roots:
        if isinstance(root, FATAL):
            return root
    return roots[0]
