"""Adds up how long the trainer was idle, by cause, and names the episodes it waits for."""

from __future__ import annotations

import math
import time

from arealite.algo.staleness import blocking_groups
from arealite.system.datapipe.group_store import GroupStore
from arealite.system.datapipe.workers import Workers

PACE_WINDOW_S = 30.0
"""Over how long the share of time lost to pacing is taken, and how often it is reported."""
NAMED = 5
"""Slow episodes named in a report."""


class IdleClock:
    """Adds up the trainer's idle time by what it waits for: episodes (groups), or pace."""

    def __init__(self) -> None:
        self.seconds = {"groups": 0.0, "pace": 0.0}
        """Since the last `take`."""
        self.cause: str | None = None
        """What the trainer waits for now; None while it does not."""
        self.pace_share = 0.0
        """Of the time lost to pacing, as an exponential average over `PACE_WINDOW_S`."""
        self._since = time.monotonic()

    def mark(self, cause: str | None) -> None:
        """Attribute the time since the last mark to the cause named then."""
        now = time.monotonic()
        passed, self._since = now - self._since, now
        if self.cause is not None:
            self.seconds[self.cause] += passed
        is_pace = self.cause == "pace"
        self.pace_share += (is_pace - self.pace_share) * -math.expm1(-passed / PACE_WINDOW_S)
        self.cause = cause

    def take(self) -> dict[str, float]:
        """Return the seconds by cause, and begin again."""
        taken, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        return {f"{cause}_wait_s": seconds for cause, seconds in taken.items()}


def slow_episodes(store: GroupStore, workers: Workers) -> list[str]:
    """Name the episodes of which the next batch has to wait for some, oldest first."""
    eta, size = store.ppo.max_staleness, store.ppo.num_groups
    if store.ppo.staleness_policy != "wait" or store.counts["complete"] < size:
        return []
    now = time.monotonic()
    runs = {
        lease_id: f"on {worker.worker_id} since {now - active.given:.1f} s"
        for worker in workers.by_id.values()
        for lease_id, active in worker.leases.items()
    }
    names: list[str] = []
    for late in blocking_groups(
        list(store.candidates()), store.next_step, eta=eta, num_groups=size
    ):
        group = store.groups[f"g{late.seq}"]
        states = dict.fromkeys(group.missing(store.ppo.max_attempts), "waits for a worker")
        for lease_id, lease in group.leases.items():
            states |= dict.fromkeys(group.due(lease), runs.get(lease_id, "on a lost worker"))
        about = f"({group.task.task_id}) of version {late.start}"
        names += [f"{group.group_id}/{m} {about} {state}" for m, state in states.items()]
    return names[:NAMED] + [f"and {len(names) - NAMED} more"] * (len(names) > NAMED)
