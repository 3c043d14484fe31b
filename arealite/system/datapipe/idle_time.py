"""Measures the trainer's idle time by cause, and lists the episodes that hold a batch back.

Under staleness policy `wait`, the datapipe holds a full batch back for slow episodes.
"""

import math
import time

from arealite.algo.staleness import blocking_groups
from arealite.system.datapipe.group_store import GroupStore
from arealite.system.datapipe.workers import Workers

SHARE_WINDOW_S = 30.0
"""Time constant of the averaged share, and minimum time between two reports."""
MAX_NAMED = 5
"""Maximum number of slow episodes in a report."""


class IdleClock:
    """The trainer's idle time by cause.

    `groups`: too few groups are complete. `slow_episodes`: they hold a full batch back.
    """

    def __init__(self) -> None:
        self.seconds = {"groups": 0.0, "slow_episodes": 0.0}
        """By cause, since the last `take`."""
        self.cause: str | None = None
        """Cause of the current wait; None while the trainer does not wait."""
        self.slow_share = 0.0
        """Share of time lost to slow episodes: an exponential average over `SHARE_WINDOW_S`."""
        self._since = time.monotonic()

    def mark(self, cause: str | None) -> None:
        """Add the time since the last call to the previous cause, and set the current cause."""
        now = time.monotonic()
        passed = now - self._since
        self._since = now
        if self.cause is not None:
            self.seconds[self.cause] += passed
        current_share = 1.0 if self.cause == "slow_episodes" else 0.0
        weight = -math.expm1(-passed / SHARE_WINDOW_S)
        self.slow_share += (current_share - self.slow_share) * weight
        self.cause = cause

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call as `<cause>_wait_s`, and reset them."""
        taken = self.seconds
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        return {f"{cause}_wait_s": seconds for cause, seconds in taken.items()}


def slow_episodes(store: GroupStore, workers: Workers) -> list[str]:
    """List the episodes that hold back a full batch under policy `wait`, oldest first."""
    eta = store.ppo.max_staleness
    size = store.ppo.num_groups
    if store.ppo.staleness_policy != "wait" or store.counts["complete"] < size:
        return []
    lease_states = _lease_states(workers)
    descriptions: list[str] = []
    candidates = list(store.candidates())
    for candidate in blocking_groups(candidates, store.next_step, eta=eta, num_groups=size):
        group = store.groups[f"g{candidate.seq}"]
        member_states = dict.fromkeys(group.leasable(store.ppo.max_attempts), "waits for a worker")
        for lease_id, lease in group.leases.items():
            lease_state = lease_states.get(lease_id, "on a lost worker")
            member_states |= dict.fromkeys(group.unfinished(lease), lease_state)
        origin = f"({group.task.task_id}) of version {candidate.start}"
        for member, state in member_states.items():
            descriptions.append(f"{group.group_id}/{member} {origin} {state}")
    num_unnamed = len(descriptions) - MAX_NAMED
    if num_unnamed > 0:
        return [*descriptions[:MAX_NAMED], f"and {num_unnamed} more"]
    return descriptions


def _lease_states(workers: Workers) -> dict[str, str]:
    """Return, by lease id, a text with the worker of a lease and the lease's age."""
    now = time.monotonic()
    return {
        lease_id: f"on {worker.worker_id} since {now - active.assigned_at:.1f} s"
        for worker in workers.by_id.values()
        for lease_id, active in worker.leases.items()
    }
