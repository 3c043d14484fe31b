"""Validates messages of workers, and passes them to the group store and the eval scheduler.

An invalid message is counted and stops no process. An invalid episode counts as a failed attempt,
so its member is leased again.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from arealite.api.payloads import Payload, from_frames
from arealite.api.rollout_messages import Episode, EpisodeIds, Failure, Progress, Result
from arealite.api.trajectory import TrajectoryHeader
from arealite.api.turns import decode_turn
from arealite.base import log
from arealite.system.datapipe.eval_scheduler import EvalScheduler
from arealite.system.datapipe.group_store import GroupStore
from arealite.system.datapipe.workers import Workers
from arealite.system.ledger.payload_checks import MIN_TEMPERATURE, find_mismatch
from arealite.system.links import wire

logger = log.get(__name__)

DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions of msgspec for a frame that is not a valid message."""
MAX_DETAIL = 200
"""Maximum length of a stored reason, in characters."""
MAX_SENDERS = 1000
"""Senders with a counter of their own: a faulty peer can send any number of different names."""


class Rejections(Counter[str]):
    """Number of rejected messages and episodes, by sender."""

    def record(self, sender: str, reason: str) -> None:
        """Count a rejected message; log the first of each sender."""
        has_counter = sender in self or len(self) < MAX_SENDERS
        name = sender if has_counter else "further senders"
        if not self[name]:
            logger.warning(
                "message rejected",
                sender=name,
                reason=reason[:MAX_DETAIL],
            )
        self[name] += 1


class ResultIds(msgspec.Struct, tag="Result", kw_only=True):
    """The ids of a Result with an invalid field, such as a number out of range."""

    worker_id: str
    episodes: list[EpisodeIds]


_decode_ids = msgspec.msgpack.Decoder(ResultIds).decode


def decode(frame: bytes) -> tuple[wire.ToDatapipe | ResultIds, str]:
    """Decode a message of a worker or a trainer rank.

    Returns:
        The message and ""; or the ids of a Result with an invalid field, and the error.

    Raises:
        DECODE_ERRORS: the frame is not a message, or another type of message is invalid.
    """
    try:
        return wire.decode_to_datapipe(frame), ""
    except DECODE_ERRORS as error:
        return _decode_ids(frame), str(error)


@dataclass(kw_only=True)
class Intake:
    """Validates episodes and turns, and stores them for training or evaluation."""

    store: GroupStore
    evals: EvalScheduler
    workers: Workers
    rejections: Rejections
    vocab_size: int
    """Number of token ids of the model."""

    def take(
        self,
        result: Result | ResultIds,
        frames: Sequence[bytes],
        message_error: str,
    ) -> None:
        """Validate and store the episodes of a result.

        Args:
            result: The message, or its ids if another field is invalid.
            frames: The payloads of its headers (`payloads.to_frames`).
            message_error: The error of the message; "" if it has none.
        """
        num_headers = [
            len(episode.headers) if isinstance(episode, Episode) else 0
            for episode in result.episodes
        ]
        payloads: list[Payload] = []
        if isinstance(result, Result):
            try:
                payloads = from_frames(result.prompts, frames)
            except msgspec.ValidationError as error:
                message_error = str(error)
        if not message_error and sum(num_headers) != len(payloads):
            message_error = f"{len(payloads)} payloads for {sum(num_headers)} headers"
        remaining_payloads = iter(payloads)
        for episode, count in zip(result.episodes, num_headers, strict=True):
            episode_payloads = list(islice(remaining_payloads, count))
            self._take_episode(result.worker_id, episode, episode_payloads, message_error)

    def _take_episode(
        self,
        worker_id: str,
        episode: EpisodeIds,
        payloads: list[Payload],
        message_error: str,
    ) -> None:
        error = message_error or _first_error(
            check_episode, episode, payloads, self.store.newest_version, self.vocab_size
        )
        is_leased = self._is_leased(worker_id, episode)
        if not error and not is_leased:
            error = f"{episode.lease_id}/{episode.member} is not leased to this worker"
        if error:
            self.rejections.record(worker_id, error)
            episode = Episode(
                lease_id=episode.lease_id,
                group_id=episode.group_id,
                member=episode.member,
                headers=[],
                failure=Failure(failure_class="rejected", detail=error[:MAX_DETAIL]),
            )
        if not is_leased or not isinstance(episode, Episode):
            return
        self.workers.finish(worker_id, episode.lease_id, episode.member)
        is_eval = self.evals.add_episode(episode)
        if not is_eval:
            self.store.add_episode(episode, payloads)

    def _is_leased(self, worker_id: str, episode: EpisodeIds) -> bool:
        """Return whether a worker has or had the lease of an episode, or its group is closed."""
        lease_id = episode.lease_id
        group_id = episode.group_id
        member = episode.member
        if not lease_id.startswith(f"{group_id}."):
            return False
        if self.evals.is_running(group_id, lease_id, member):
            worker = self.workers.by_id.get(worker_id)
            return worker is not None and lease_id in worker.leases
        if group := self.store.groups.get(group_id):
            return member in group.finished or group.was_leased(worker_id, lease_id, member)
        return self._was_created(group_id)

    def _was_created(self, group_id: str) -> bool:
        """Return whether an id is of a training group created so far, or of an evaluation."""
        match = re.fullmatch(r"g(\d{1,12})|e\d+-\d+", group_id)
        if match is None:
            return False
        seq = match[1]
        return seq is None or int(seq) < self.store.offered

    def take_progress(self, progress: Progress, payloads: Sequence[bytes]) -> None:
        """Validate and store turns of unfinished episodes.

        Args:
            progress: Headers of the turns.
            payloads: One encoded turn for each header.
        """
        error = _first_error(check_progress, progress, payloads, self.store.newest_version)
        group = self.store.groups.get(progress.group_id)
        owner = group.owners.get(progress.lease_id) if group else None
        if owner is not None and owner != progress.worker_id:
            error = f"{progress.lease_id} is not leased to this worker"
        if error:
            self.rejections.record(progress.worker_id, error)
        else:
            self.store.add_turns(progress, payloads)


def _first_error(check: Callable[..., str], *args: object) -> str:
    """Return the result of a check, or the exception that the check raises."""
    try:
        return check(*args)
    except Exception as error:  # noqa: BLE001  (an invalid message can raise anything)
        return repr(error)


def check_episode(
    episode: Episode,
    payloads: Sequence[Payload],
    newest: int,
    vocab_size: int = 1 << 31,
) -> str:
    """Return the first error of an episode; "" if it has none.

    Args:
        episode: The episode that a worker sent.
        payloads: One for each header.
        newest: The newest version that can have sampled a token.
        vocab_size: Number of token ids of the model.
    """
    has_finished = episode.failure is None
    seats = {header.seat for header in episode.headers}
    if has_finished != bool(seats) or len(seats) < len(episode.headers):
        return "it needs one trajectory for each seat, or a failure"
    is_eval = episode.group_id.startswith("e")
    for header, payload in zip(episode.headers, payloads, strict=True):
        if error := _header_error(header, episode, newest):
            return error
        mismatch = find_mismatch(
            header,
            payload,
            vocab_size=vocab_size,
            min_temperature=0.0 if is_eval else MIN_TEMPERATURE,  # evaluations may be greedy
        )
        if mismatch:
            return f"the payload of {header.trajectory_id} differs from its header: {mismatch}"
    return ""


def _header_error(header: TrajectoryHeader, episode: Episode, newest: int) -> str:
    """Return the first error of a header of an episode; "" if it has none."""
    is_of_member = header.group_id == episode.group_id and header.member == episode.member
    trajectory_id = f"{episode.group_id}/{episode.member}/{header.seat}"
    if not is_of_member or header.trajectory_id != trajectory_id:
        return "a header has the ids of another episode"
    numbers = (
        header.reward or 0.0,
        header.seconds,
        *header.reward_parts.values(),
        *header.waits.values(),
    )
    if not all(map(math.isfinite, numbers)):
        return "a number is not finite"
    if header.newest_version > newest:
        return f"version {header.newest_version}, but the newest is {newest}"
    return ""


def check_progress(
    progress: Progress,
    payloads: Sequence[bytes],
    newest: int,
) -> str:
    """Return the first error of the turns of an unfinished episode; "" if they have none.

    Args:
        progress: Headers of the turns.
        payloads: One encoded turn for each header.
        newest: The newest version that can have sampled a token.
    """
    for turn, payload in zip(progress.turns, payloads, strict=True):
        response = decode_turn(payload).response
        arrays = (response.output_ids, response.logprobs, response.versions)
        lengths = {len(array) for array in arrays}
        has_top = len(response.top_ids) == len(response.top_logprobs)
        if len(lengths) > 1 or not has_top or turn.oldest_version > newest:
            return f"turn {turn.index} of seat {turn.seat}: wrong array lengths or version"
    return ""
