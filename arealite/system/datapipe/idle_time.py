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
        is_slow = self.cause == "slow_episodes"
        self.slow_share += (is_slow - self.slow_share) * -math.expm1(-passed / SHARE_WINDOW_S)
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
    now = time.monotonic()
    runs = {
        lease_id: f"on {worker.worker_id} since {now - active.assigned_at:.1f} s"
        for worker in workers.by_id.values()
        for lease_id, active in worker.leases.items()
    }
    names: list[str] = []
    candidates = list(store.candidates())
    for late in blocking_groups(candidates, store.next_step, eta=eta, num_groups=size):
        group = store.groups[f"g{late.seq}"]
        states = dict.fromkeys(group.leasable(store.ppo.max_attempts), "waits for a worker")
        for lease_id, lease in group.leases.items():
            states |= dict.fromkeys(group.unfinished(lease), runs.get(lease_id, "on a lost worker"))
        source = f"({group.task.task_id}) of version {late.start}"
        names += [f"{group.group_id}/{m} {source} {state}" for m, state in states.items()]
    return names[:MAX_NAMED] + [f"and {len(names) - MAX_NAMED} more"] * (len(names) > MAX_NAMED)
