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

from arealite.api.rollout_messages import Episode, EpisodeIds, Failure, Progress, Result
from arealite.api.turns import decode_turn
from arealite.base import log
from arealite.system.datapipe.eval_scheduler import EvalScheduler
from arealite.system.datapipe.group_store import GroupStore
from arealite.system.datapipe.workers import Workers
from arealite.system.ledger.payloads import MIN_TEMPERATURE, find_mismatch
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
        sender = sender if len(self) < MAX_SENDERS or sender in self else "further senders"
        if not self[sender]:
            logger.warning("message rejected", sender=sender, reason=reason[:MAX_DETAIL])
        self[sender] += 1


class ResultIds(msgspec.Struct, tag="Result"):
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


@dataclass
class Intake:
    """Validates episodes and turns, and stores them for training or evaluation."""

    store: GroupStore
    evals: EvalScheduler
    workers: Workers
    rejections: Rejections
    vocab_size: int
    """Number of token ids of the model."""

    def take(self, result: Result | ResultIds, payloads: Sequence[bytes], wrong: str) -> None:
        """Validate and store the episodes of a result.

        Args:
            result: The message, or its ids if another field is invalid.
            payloads: One for each header of its episodes.
            wrong: The error of the message; "" if it has none.
        """
        sizes = [len(e.headers) if isinstance(e, Episode) else 0 for e in result.episodes]
        if sum(sizes) != len(payloads):
            wrong = wrong or f"{len(payloads)} payloads for {sum(sizes)} headers"
        frames = iter(payloads)
        for episode, size in zip(result.episodes, sizes, strict=True):
            self._take_episode(result.worker_id, episode, [*islice(frames, size)], wrong)

    def _take_episode(
        self, worker_id: str, episode: EpisodeIds, payloads: list[bytes], wrong: str
    ) -> None:
        ids = (episode.lease_id, episode.group_id, episode.member)
        newest = self.store.newest_version
        size = self.vocab_size
        wrong = wrong or _tried(check_episode, episode, payloads, newest, size)
        is_leased = self._is_leased(worker_id, *ids)
        if wrong or not is_leased:
            wrong = wrong or f"{ids[0]}/{ids[2]} is not leased to this worker"
            self.rejections.record(worker_id, wrong)
            episode = Episode(*ids, [], Failure("rejected", wrong[:MAX_DETAIL]))
        if is_leased and isinstance(episode, Episode):
            self.workers.finish(worker_id, episode.lease_id, episode.member)
            if not self.evals.add_episode(episode):
                self.store.add_episode(episode, payloads)

    def _is_leased(self, worker_id: str, lease_id: str, group_id: str, member: int) -> bool:
        """Return whether a worker has or had the lease of an episode, or its group is closed."""
        if not lease_id.startswith(f"{group_id}."):
            return False
        if self.evals.is_running(group_id, lease_id, member):
            worker = self.workers.by_id.get(worker_id)
            return worker is not None and lease_id in worker.leases
        if group := self.store.groups.get(group_id):
            return member in group.finished or group.was_leased(worker_id, lease_id, member)
        ids = re.fullmatch(r"g(\d{1,12})|e\d+-\d+", group_id)
        return ids is not None and int(ids[1] or -1) < self.store.offered

    def take_progress(self, progress: Progress, payloads: Sequence[bytes]) -> None:
        """Validate and store turns of unfinished episodes.

        Args:
            progress: Headers of the turns.
            payloads: One encoded turn for each header.
        """
        wrong = _tried(check_progress, progress, payloads, self.store.newest_version)
        group = self.store.groups.get(progress.group_id)
        if group and group.owners.get(progress.lease_id) not in (None, progress.worker_id):
            wrong = f"{progress.lease_id} is not leased to this worker"
        if wrong:
            self.rejections.record(progress.worker_id, wrong)
        else:
            self.store.add_turns(progress, payloads)


def _tried(check: Callable[..., str], *args: object) -> str:
    try:
        return check(*args)
    except Exception as error:  # noqa: BLE001  (an invalid message can raise anything)
        return repr(error)


def check_episode(
    episode: Episode, payloads: Sequence[bytes], newest: int, vocab_size: int = 1 << 31
) -> str:
    """Return the first error of an episode; "" if it has none.

    Args:
        episode: The episode that a worker sent.
        payloads: One for each header.
        newest: The newest version that can have sampled a token.
        vocab_size: Number of token ids of the model.
    """
    is_eval = episode.group_id.startswith("e")
    lowest = 0.0 if is_eval else MIN_TEMPERATURE  # evaluations may be greedy
    ids = (episode.group_id, episode.member)
    seats = {h.seat for h in episode.headers}
    if (episode.failure is None) != bool(seats) or len(seats) < len(episode.headers):
        return "it needs one trajectory for each seat, or a failure"
    for h, payload in zip(episode.headers, payloads, strict=True):
        if (h.group_id, h.member, h.trajectory_id) != (*ids, f"{ids[0]}/{ids[1]}/{h.seat}"):
            return "a header has the ids of another episode"
        numbers = (h.reward or 0.0, h.seconds, *h.reward_parts.values(), *h.waits.values())
        if not all(map(math.isfinite, numbers)):
            return "a number is not finite"
        if h.newest_version > newest:
            return f"version {h.newest_version}, but the newest is {newest}"
        if what := find_mismatch(h, payload, vocab_size=vocab_size, min_temperature=lowest):
            return f"the payload of {h.trajectory_id} differs from its header: {what}"
    return ""


def check_progress(progress: Progress, payloads: Sequence[bytes], newest: int) -> str:
    """Return the first error of the turns of an unfinished episode; "" if they have none.

    Args:
        progress: Headers of the turns.
        payloads: One encoded turn for each header.
        newest: The newest version that can have sampled a token.
    """
    for turn, payload in zip(progress.turns, payloads, strict=True):
        response = decode_turn(payload).response
        sizes = {*map(len, (response.output_ids, response.logprobs, response.versions))}
        if len(sizes) > 1 or turn.oldest_version > newest:
            return f"turn {turn.index} of seat {turn.seat}: wrong array lengths or version"
    return ""
