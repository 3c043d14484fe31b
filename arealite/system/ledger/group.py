"""Knows one open group: who runs which of its episodes, what came back, and what is kept meanwhile.

Beside the ledger, which keeps it; what a single group may do next depends on it alone.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Sequence

import msgspec

from arealite.api.rollout_messages import Failure, Lease, TurnHeader
from arealite.api.task import Task
from arealite.api.trainer import PPOConfig
from arealite.api.trajectory import TrajectoryHeader

LOST = "worker_lost"
"""Failure class of an episode whose worker died or forgot it."""
BACK_OFF_S, MAX_BACK_OFF_S = 0.2, 5.0
"""How long after its first failure, doubled with each further one, an episode is offered again."""


class Group(msgspec.Struct, eq=False):
    """One group that is not trained yet: who runs which of its episodes, and what came back."""

    seq: int
    group_id: str
    task: Task
    size: int
    epoch: int
    row: int
    """Of the dataset, where the task is from."""
    finished: dict[int, list[TrajectoryHeader]] = {}
    leases: dict[str, Lease] = {}
    """Live ones; their `members` that are neither finished nor failed are still due."""
    owners: dict[str, str] = {}
    """By lease id: the worker."""
    failures: list[tuple[int, str, str]] = []
    """(member, lease id, class) of each failed attempt."""
    turns: dict[int, dict[tuple[str, int], TurnHeader]] = {}
    """By member, then by (seat, index): turns of unfinished episodes that are kept."""
    rests_until: dict[int, float] = {}
    """When (monotonic) members that have failed may be offered again."""
    state: str = "offered"
    reason: str | None = None
    """Why it was filtered."""
    step: int | None = None
    """Of the batch that holds it, or held it before a roll-back."""
    place: int | None = None
    """In that batch."""

    @property
    def headers(self) -> list[TrajectoryHeader]:
        """All trajectories, by member and seat."""
        return [h for member in sorted(self.finished) for h in self.finished[member]]

    @property
    def start(self) -> int | None:
        """Version of the oldest token, also of a kept turn, or of the oldest live lease where that
        is less."""
        versions = [lease.version for lease in self.leases.values()]
        versions += [
            turn.oldest_version for turns in self.turns.values() for turn in turns.values()
        ]
        versions += [h.oldest_version for headers in self.finished.values() for h in headers]
        return min(versions, default=None)

    def due(self, lease: Lease) -> list[int]:
        """Members that a lease still has to deliver."""
        failed = {m for m, lease_id, _ in self.failures if lease_id == lease.lease_id}
        return [m for m in lease.members if m not in self.finished and m not in failed]

    def given_up(self, max_attempts: int) -> set[int]:
        """Members that failed as often as is allowed."""
        counts = Counter(member for member, _, _ in self.failures)
        return {m for m, n in counts.items() if n >= max_attempts and m not in self.finished}

    def was_leased(self, worker_id: str, lease_id: str, member: int) -> bool:
        """Return whether a worker holds a member under a lease, or held it before a loss.

        After a restart, a lost lease is known from the failures only, without its worker.
        """
        owner, lease = self.owners.get(lease_id), self.leases.get(lease_id)
        if owner is None:
            return any((member, lease_id) == known[:2] for known in self.failures)
        members = range(self.size) if lease is None else lease.members
        return owner == worker_id and member in members

    def outcome(self, ppo: PPOConfig) -> tuple[str, str] | None:
        """Return the group's next state and the reason if filtered; None while it is unfinished."""
        given_up = self.given_up(ppo.max_attempts)
        if ppo.partial_group == "drop":  # at the first failure that is the episode's own
            given_up |= {member for member, _, name in self.failures if name != LOST}
        enough = min(2, self.size) if ppo.partial_group == "min_size" else self.size
        if self.size - len(given_up) < enough:
            classes = [name for member, _, name in self.failures if member in given_up]
            return "filtered", f"failed:{classes[-1]}"
        if len(self.finished) + len(given_up) < self.size:
            return None
        seats = {h.seat for h in self.headers}
        rewards = {(h.seat, h.reward) for h in self.headers}
        if not self.headers:
            return "filtered", "empty"
        if ppo.filter_zero_variance and len(rewards) == len(seats):
            return "filtered", "zero_variance"
        return "complete", ""

    def rest(self, member: int) -> None:
        """Let a failed episode wait, so that what makes it fail is not hammered."""
        failures = sum(m == member and name != LOST for m, _, name in self.failures)
        self.rests_until[member] = time.monotonic() + back_off_s(failures)

    def missing(self, max_attempts: int, now: float = math.inf) -> list[int]:
        """Members that nobody runs and that may be offered `now` (by default: ever)."""
        busy = {m for lease in self.leases.values() for m in self.due(lease)}
        busy |= self.given_up(max_attempts)
        busy |= {m for m, until in self.rests_until.items() if until > now}
        return [m for m in range(self.size) if m not in self.finished and m not in busy]


def back_off_s(failures: int) -> float:
    """Return how long an episode that has failed so often rests."""
    return min(MAX_BACK_OFF_S, BACK_OFF_S * 2 ** (failures - 1))


def too_many(window: deque[bool], first: Failure | None, *, share: float) -> str:
    """Say so if more than `share` of a whole window of episodes failed, `first` before all others;
    else return ""."""
    if first is None or sum(window) <= share * (window.maxlen or 1):
        return ""
    return (
        f"{sum(window)} of the last {len(window)} episodes failed, more than "
        f"datapipe.max_failed_share={share} allows. The first: {first.failure_class}: "
        f"{first.detail}"
    )


def can_be_made(step: int, groups: Sequence[Group], ppo: PPOConfig) -> bool:
    """Say whether a batch of before a roll-back may be made again, for a trainer with this batch
    size and staleness."""
    starts = [group.start for group in groups if group.start is not None]
    is_masked = ppo.staleness_policy == "mask"
    is_young = is_masked or step - min(starts, default=step) <= ppo.max_staleness
    return is_young and len(groups) == ppo.num_groups
