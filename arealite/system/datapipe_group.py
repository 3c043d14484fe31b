"""One group that is not trained yet: who runs which of its episodes, and what came back.

Apart from the book of all groups, because what a group is due or missing follows from it alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from arealite.api.rollout_messages import Lease
from arealite.api.task import Task
from arealite.api.trajectory import TrajectoryHeader


@dataclass
class Group:
    """One group that is not trained yet."""

    seq: int
    group_id: str
    task: Task
    size: int
    finished: dict[int, list[TrajectoryHeader]] = field(
        default_factory=dict[int, list[TrajectoryHeader]]
    )
    leases: dict[str, Lease] = field(default_factory=dict[str, Lease])
    """Live ones; their `members` that are neither finished nor failed are still due."""
    failures: list[tuple[int, str, str]] = field(default_factory=list[tuple[int, str, str]])
    """(member, lease id, class) of each failed attempt."""
    state: str = "offered"
    step: int | None = None
    place: int = 0

    @property
    def headers(self) -> list[TrajectoryHeader]:
        """All trajectories, by member and seat."""
        return [h for member in sorted(self.finished) for h in self.finished[member]]

    @property
    def start(self) -> int | None:
        """Version of the oldest token, or of the oldest live lease where that is less."""
        versions = [lease.version for lease in self.leases.values()]
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

    def missing(self, max_attempts: int) -> list[int]:
        """Members that nobody runs and that may still be offered."""
        busy = {m for lease in self.leases.values() for m in self.due(lease)}
        busy |= self.given_up(max_attempts)
        return [m for m in range(self.size) if m not in self.finished and m not in busy]
