"""Checks results and turns of workers, and hands them to the group store and the eval scheduler.

A wrong message is counted and ends no process. A wrong episode counts as a failed attempt, so its
member is offered again.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from arealite.api.episode import decode_turn
from arealite.api.rollout_messages import Episode, EpisodeIds, Failure, Progress, Result
from arealite.base import log
from arealite.system.datapipe.eval_scheduler import EvalScheduler
from arealite.system.datapipe.group_store import GroupStore
from arealite.system.datapipe.workers import Workers
from arealite.system.ledger.payloads import COLDEST, unlike
from arealite.system.links import wire

logger = log.get(__name__)

NO_MESSAGE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors that msgspec raises for bytes that are no message."""
MAX_DETAIL = 200
"""Characters of a reason that are kept."""
MAX_SENDERS = 1000
"""Senders that are counted one by one; a peer can invent any number of names."""


class Rejections(Counter[str]):
    """Counts rejected messages and rejected episodes by sender."""

    def note(self, sender: str, reason: str) -> None:
        """Count a message; log the first of each sender."""
        sender = sender if len(self) < MAX_SENDERS or sender in self else "further senders"
        if not self[sender]:
            logger.warning("message rejected", sender=sender, reason=reason[:MAX_DETAIL])
        self[sender] += 1


class ResultIds(msgspec.Struct, tag="Result"):
    """The ids of a Result whose other fields are wrong, as a number out of range is."""

    worker_id: str
    episodes: list[EpisodeIds]


_decode_ids = msgspec.msgpack.Decoder(ResultIds).decode


def decode(frame: bytes) -> tuple[wire.ToDatapipe | ResultIds, str]:
    """Return a message and ""; for a Result with a wrong field, its ids and the error.

    Raises:
        NO_MESSAGE: the frame is no message, or a message of another kind has a wrong field.
    """
    try:
        return wire.decode_to_datapipe(frame), ""
    except NO_MESSAGE as error:
        return _decode_ids(frame), str(error)


@dataclass
class Intake:
    """Checks episodes and turns, and hands them to the stores of training and evaluation."""

    store: GroupStore
    evals: EvalScheduler
    workers: Workers
    rejections: Rejections
    vocab_size: int
    """Number of token ids of the model."""

    def take(self, result: Result | ResultIds, payloads: Sequence[bytes], wrong: str) -> None:
        """Take in a result; `wrong` is the error of the whole message, "" if it has none."""
        sizes = [len(e.headers) if isinstance(e, Episode) else 0 for e in result.episodes]
        if sum(sizes) != len(payloads):
            wrong = wrong or "payloads are missing, or too many"
        frames = iter(payloads)
        for episode, size in zip(result.episodes, sizes, strict=True):
            self._take_episode(result.worker_id, episode, [*islice(frames, size)], wrong)

    def _take_episode(
        self, worker_id: str, episode: EpisodeIds, payloads: list[bytes], wrong: str
    ) -> None:
        ids = (episode.lease_id, episode.group_id, episode.member)
        wrong = wrong or _tried(
            check_episode, episode, payloads, self.store.newest, self.vocab_size
        )
        is_leased = self._is_leased(worker_id, *ids)
        if wrong or not is_leased:
            wrong = wrong or f"{ids[0]}/{ids[2]} is no lease of this worker"
            self.rejections.note(worker_id, wrong)
            episode = Episode(*ids, [], Failure("rejected", wrong[:MAX_DETAIL]))
        if is_leased and isinstance(episode, Episode):
            self.workers.finish(worker_id, episode.lease_id, episode.member)
            if not self.evals.add(episode):
                self.store.add(episode, payloads)

    def _is_leased(self, worker_id: str, lease_id: str, group_id: str, member: int) -> bool:
        """Return whether a worker holds or held the lease of an episode, or its group is over."""
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
        """Check and store turns of unfinished episodes."""
        wrong = _tried(check_progress, progress, payloads, self.store.newest)
        group = self.store.groups.get(progress.group_id)
        if group and group.owners.get(progress.lease_id) not in (None, progress.worker_id):
            wrong = f"{progress.lease_id} is no lease of this worker"
        if wrong:
            self.rejections.note(progress.worker_id, wrong)
        else:
            self.store.keep(progress, payloads)


def _tried(check: Callable[..., str], *args: Any) -> str:
    try:
        return check(*args)
    except Exception as error:  # noqa: BLE001  (a message may break a check in any way)
        return repr(error)


def check_episode(
    episode: Episode, payloads: Sequence[bytes], newest: int, vocab_size: int = 1 << 31
) -> str:
    """Return the first error of an episode; "" if it has none.

    Args:
        episode: From a worker.
        payloads: One for each of its headers.
        newest: The newest version that can have sampled a token.
        vocab_size: Number of token ids of the model.
    """
    coldest = 0.0 if episode.group_id.startswith("e") else COLDEST  # evaluations may be greedy
    ids, seats = (episode.group_id, episode.member), {h.seat for h in episode.headers}
    if (episode.failure is None) != bool(seats) or len(seats) < len(episode.headers):
        return "neither one trajectory a seat nor a failure"
    for h, payload in zip(episode.headers, payloads, strict=True):
        if (h.group_id, h.member, h.trajectory_id) != (*ids, f"{ids[0]}/{ids[1]}/{h.seat}"):
            return "a trajectory of another episode"
        numbers = (h.reward, h.seconds, *h.reward_parts.values(), *h.waits.values())
        if not all(map(math.isfinite, numbers)):
            return "a number is not finite"
        if h.newest_version > newest:
            return f"version {h.newest_version}, but the newest is {newest}"
        if what := unlike(h, payload, vocab_size=vocab_size, coldest=coldest):
            return f"the payload of {h.trajectory_id} differs from its header: {what}"
    return ""


def check_progress(progress: Progress, payloads: Sequence[bytes], newest: int) -> str:
    """Return the first error of the turns of an unfinished episode; "" if they have none."""
    for turn, payload in zip(progress.turns, payloads, strict=True):
        stored = decode_turn(payload)
        sizes = {*map(len, (stored.output_ids, stored.logprobs, stored.versions))}
        if len(sizes) > 1 or sizes.pop() % 4 or turn.oldest_version > newest:
            return f"turn {turn.index} of seat {turn.seat}: wrong array lengths or version"
    return ""
