"""One open group: its leases, finished episodes, failures and stored turns, and the rules for them.

A rule that needs only one group is here. Rules over all groups are in `datapipe.group_store`.
"""

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
"""Failure class of an episode whose worker died or lost its lease."""
BACK_OFF_S, MAX_BACK_OFF_S = 0.2, 5.0
"""Delay after the first failure of an episode, and the limit of its doubling."""


class Group(msgspec.Struct, eq=False):
    """One group that is not trained yet."""

    seq: int
    """Number of the group, from 0."""
    group_id: str
    task: Task
    size: int
    """Number of members (episodes)."""
    epoch: int
    """Epoch of the dataset, from 0."""
    row: int
    """Row of the dataset."""
    finished: dict[int, list[TrajectoryHeader]] = {}
    """By member: a header for each seat."""
    leases: dict[str, Lease] = {}
    """By lease id: active leases."""
    owners: dict[str, str] = {}
    """By lease id: id of the worker."""
    failures: list[tuple[int, str, str]] = []
    """(member, lease id, failure class) of each failed attempt."""
    turns: dict[int, dict[tuple[str, int], TurnHeader]] = {}
    """By member, then by (seat, index): stored turns of unfinished episodes."""
    retry_at: dict[int, float] = {}
    """By member: monotonic time from which a failed member may be leased again."""
    state: str = "offered"
    """offered, leased, complete, filtered, batched, trained or durable."""
    reason: str | None = None
    """Reason why the group was filtered."""
    step: int | None = None
    """Batch that contains the group, or contained it before a roll-back."""
    place: int | None = None
    """Position in that batch."""

    @property
    def headers(self) -> list[TrajectoryHeader]:
        """Headers of all trajectories, ordered by member and seat."""
        return [h for member in sorted(self.finished) for h in self.finished[member]]

    @property
    def start(self) -> int | None:
        """Oldest version of all its tokens, stored turns and active leases; None if it has none."""
        versions = [lease.version for lease in self.leases.values()]
        versions += [t.oldest_version for turns in self.turns.values() for t in turns.values()]
        versions += [h.oldest_version for headers in self.finished.values() for h in headers]
        return min(versions, default=None)

    def unfinished(self, lease: Lease) -> list[int]:
        """List the members of a lease that have neither finished nor failed."""
        failed = {m for m, lease_id, _ in self.failures if lease_id == lease.lease_id}
        return [m for m in lease.members if m not in self.finished and m not in failed]

    def exhausted(self, max_attempts: int) -> set[int]:
        """List the members that failed `max_attempts` times."""
        counts = Counter(member for member, _, _ in self.failures)
        return {m for m, n in counts.items() if n >= max_attempts and m not in self.finished}

    def was_leased(self, worker_id: str, lease_id: str, member: int) -> bool:
        """Return whether a member is or was leased to a worker.

        After a restart, only `failures` lists a lost lease, without its worker; then any worker is
        accepted.
        """
        owner = self.owners.get(lease_id)
        lease = self.leases.get(lease_id)
        if owner is None:
            return any((member, lease_id) == known[:2] for known in self.failures)
        members = range(self.size) if lease is None else lease.members
        return owner == worker_id and member in members

    def outcome(self, ppo: PPOConfig) -> tuple[str, str] | None:
        """Return the next state and the reason of filtering; None while members are unfinished."""
        exhausted = self.exhausted(ppo.max_attempts)
        if ppo.partial_group == "drop":  # at the first failure that is not a lost worker
            exhausted |= {member for member, _, name in self.failures if name != LOST}
        enough = min(2, self.size) if ppo.partial_group == "min_size" else self.size
        if self.size - len(exhausted) < enough:
            classes = [name for member, _, name in self.failures if member in exhausted]
            return "filtered", f"failed:{classes[-1]}"
        if len(self.finished) + len(exhausted) < self.size:
            return None
        rewards = {(h.seat, h.reward) for h in self.headers if h.reward is not None}
        if not self.headers:
            return "filtered", "empty"
        has_gradient = len(rewards) > len({seat for seat, _ in rewards})
        if ppo.filter_zero_variance and not has_gradient:
            return "filtered", "zero_variance"
        return "complete", ""

    def back_off(self, member: int) -> None:
        """Set the time of a failed member's next attempt: exponential backoff."""
        failures = sum(m == member and name != LOST for m, _, name in self.failures)
        self.retry_at[member] = time.monotonic() + back_off_s(failures)

    def leasable(self, max_attempts: int, now: float = math.inf) -> list[int]:
        """List the unfinished, unleased members that may be leased.

        Args:
            max_attempts: Members with this many failures are left out.
            now: Monotonic time; members with a later `retry_at` are left out. Default: none are.
        """
        busy = {m for lease in self.leases.values() for m in self.unfinished(lease)}
        busy |= self.exhausted(max_attempts)
        busy |= {m for m, until in self.retry_at.items() if until > now}
        return [m for m in range(self.size) if m not in self.finished and m not in busy]


def back_off_s(failures: int) -> float:
    """Return the delay before the next attempt of an episode, in seconds.

    Args:
        failures: Number of failed attempts, at least 1.
    """
    return min(MAX_BACK_OFF_S, BACK_OFF_S * 2 ** (failures - 1))


def too_many_failures(window: deque[bool], first: Failure | None, *, share: float) -> str:
    """Return an error if too many of the recent episodes failed; else "".

    Args:
        window: For each recent episode: whether it failed.
        first: The first failure of the run.
        share: Allowed share of failures in a full window.
    """
    if first is None or sum(window) <= share * (window.maxlen or 1):
        return ""
    what = f"{sum(window)} of the last {len(window)} episodes failed, more than"
    what += f" datapipe.max_failed_share={share} allows. The first:"
    return f"{what} {first.failure_class}: {first.detail}"


def can_recompose(step: int, groups: Sequence[Group], ppo: PPOConfig) -> bool:
    """Return whether a rolled-back batch fits the current batch size and staleness bound."""
    starts = [group.start for group in groups if group.start is not None]
    is_masked = ppo.staleness_policy == "mask"
    is_young = is_masked or step - min(starts, default=step) <= ppo.max_staleness
    return is_young and len(groups) == ppo.num_groups
