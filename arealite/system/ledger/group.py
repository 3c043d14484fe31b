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
FAILURE_WINDOW = 256
"""Number of recent episodes in the share of failures."""
BACK_OFF_S = 0.2
"""Delay after the first failure of an episode; each further failure doubles it."""
MAX_BACK_OFF_S = 5.0
"""Maximum delay after a failure."""


class Group(msgspec.Struct, eq=False, kw_only=True):
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
        headers: list[TrajectoryHeader] = []
        for member in sorted(self.finished):
            headers += self.finished[member]
        return headers

    @property
    def start(self) -> int | None:
        """Oldest version of all its tokens, stored turns and active leases; None if it has none."""
        versions = [lease.version for lease in self.leases.values()]
        for turns in self.turns.values():
            versions += [turn.oldest_version for turn in turns.values()]
        for headers in self.finished.values():
            versions += [header.oldest_version for header in headers]
        return min(versions, default=None)

    def unfinished(self, lease: Lease) -> list[int]:
        """List the members of a lease that have neither finished nor failed."""
        ended = {*self.finished}
        for member, lease_id, _ in self.failures:
            if lease_id == lease.lease_id:
                ended.add(member)
        return [member for member in lease.members if member not in ended]

    def exhausted(self, max_attempts: int) -> set[int]:
        """Return the unfinished members that failed `max_attempts` times."""
        counts = Counter(member for member, _, _ in self.failures)
        exhausted = {member for member, count in counts.items() if count >= max_attempts}
        return exhausted - self.finished.keys()

    def was_leased(self, worker_id: str, lease_id: str, member: int) -> bool:
        """Return whether a member is or was leased to a worker.

        After a restart, only `failures` lists a lost lease, without its worker; then any worker is
        accepted.
        """
        owner = self.owners.get(lease_id)
        if owner is None:
            return self.has_failed(member, lease_id)
        lease = self.leases.get(lease_id)
        members = range(self.size) if lease is None else lease.members
        return owner == worker_id and member in members

    def has_failed(self, member: int, lease_id: str) -> bool:
        """Return whether the attempt of a member under a lease is in `failures`."""
        return any(
            failed_member == member and failed_lease_id == lease_id
            for failed_member, failed_lease_id, _ in self.failures
        )

    def outcome(self, ppo: PPOConfig) -> tuple[str, str] | None:
        """Return the next state and the reason of filtering; None while members are unfinished."""
        exhausted = self.exhausted(ppo.max_attempts)
        if ppo.partial_group == "drop":  # at the first failure that is not a lost worker
            exhausted |= {
                member for member, _, failure_class in self.failures if failure_class != LOST
            }
        min_size = min(2, self.size) if ppo.partial_group == "min_size" else self.size
        if self.size - len(exhausted) < min_size:
            classes = [
                failure_class for member, _, failure_class in self.failures if member in exhausted
            ]
            return "filtered", f"failed:{classes[-1]}"
        if len(self.finished) + len(exhausted) < self.size:
            return None
        if not self.headers:
            return "filtered", "empty"
        if ppo.filter_zero_variance and not self._has_gradient():
            return "filtered", "zero_variance"
        return "complete", ""

    def _has_gradient(self) -> bool:
        """Return whether a seat has two different rewards, so that advantages are not all 0."""
        headers = [header for header in self.headers if header.reward is not None]
        rewards = {(header.seat, header.reward) for header in headers}
        seats = {header.seat for header in headers}
        return len(rewards) > len(seats)

    def back_off(self, member: int) -> None:
        """Set the time of a failed member's next attempt: exponential backoff."""
        num_failures = 0
        for failed_member, _, failure_class in self.failures:
            if failed_member == member and failure_class != LOST:
                num_failures += 1
        self.retry_at[member] = time.monotonic() + back_off_s(num_failures)

    def leasable(self, max_attempts: int, now: float = math.inf) -> list[int]:
        """List the unfinished, unleased members that may be leased.

        Args:
            max_attempts: Members with this many failures are left out.
            now: Monotonic time; members with a later `retry_at` are left out. Default: none are.
        """
        excluded = self.exhausted(max_attempts) | self.finished.keys()
        for lease in self.leases.values():
            excluded.update(self.unfinished(lease))
        for member, retry_at in self.retry_at.items():
            if retry_at > now:
                excluded.add(member)
        return [member for member in range(self.size) if member not in excluded]


def back_off_s(failures: int) -> float:
    """Return the delay before the next attempt of an episode, in seconds.

    Args:
        failures: Number of failed attempts, at least 1.
    """
    return min(MAX_BACK_OFF_S, BACK_OFF_S * 2 ** (failures - 1))


def too_many_failures(
    window: deque[bool],
    first: Failure | None,
    *,
    share: float,
) -> str:
    """Return an error if too many of the recent episodes failed; else "".

    Args:
        window: For each recent episode: whether it failed.
        first: The first failure of the run.
        share: Allowed share of failures in a full window.
    """
    num_failed = sum(window)
    if first is None or num_failed <= share * (window.maxlen or 1):
        return ""
    return (
        f"{num_failed} of the last {len(window)} episodes failed, more than "
        f"datapipe.max_failed_share={share} allows. "
        f"The first: {first.failure_class}: {first.detail}"
    )


def can_recompose(
    step: int,
    groups: Sequence[Group],
    ppo: PPOConfig,
) -> bool:
    """Return whether a rolled-back batch fits the current batch size and staleness bound."""
    if len(groups) != ppo.num_groups:
        return False
    if ppo.staleness_policy == "mask":
        return True
    starts = [group.start for group in groups if group.start is not None]
    staleness = step - min(starts, default=step)
    return staleness <= ppo.max_staleness
