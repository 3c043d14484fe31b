"""Knows the rollout workers: how to reach each, what it runs, and how much more it wants.

Credit is level-triggered: a worker tells what it holds, and what it should hold besides was lost
with a message or a restart and is offered again, so neither loses an episode.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from arealite.api.rollout_messages import Lease, WorkerState

UNKNOWN_S = 3.0
"""A lease that its worker does not list this long after it was sent has not reached it."""


@dataclass
class ActiveLease:
    """A lease that a worker holds. It may outlive its group, which is filtered at a failure."""

    lease: Lease
    due: set[int]
    """Members that the worker still runs."""
    given: float
    """When (monotonic) the worker was chosen."""
    sent: float = math.inf
    """When (monotonic) the lease was last sent."""

    def remaining(self) -> Lease:
        """Return the lease of the members that are still due."""
        return msgspec.structs.replace(self.lease, members=sorted(self.due))


@dataclass
class Worker:
    """One rollout worker."""

    worker_id: str
    process: str = ""
    """As its last state told; "" before the first."""
    route: bytes | None = None
    capacity: int = 0
    seen: float = field(default_factory=time.monotonic)
    leases: dict[str, ActiveLease] = field(default_factory=dict[str, ActiveLease])
    metrics: dict[str, float] = field(default_factory=dict[str, float])

    limit: int = sys.maxsize
    """Most that it may run, where that is less than its capacity."""

    @property
    def in_flight(self) -> int:
        """Episodes it runs."""
        return sum(len(active.due) for active in self.leases.values())

    @property
    def credit(self) -> int:
        """Episodes it wants besides."""
        most = min(self.capacity, self.limit)
        return most - self.in_flight if self.route is not None else 0


class Workers:
    """All workers heard of within the time to live of a lease."""

    def __init__(self, *, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self.by_id: dict[str, Worker] = {}
        self._limit = sys.maxsize
        self.told: Callable[[], dict[str, float]] = dict[str, float]
        """Further metrics, of who scales them."""

    def scale(self, limit: int, *, leaving: str = "") -> None:
        """Let each worker run `limit` episodes, one that is `leaving` none besides what it has."""
        self._limit = limit
        for worker in self.by_id.values():
            worker.limit = 0 if worker.worker_id == leaving else limit

    def _known(self, worker_id: str) -> Worker:
        return self.by_id.setdefault(worker_id, Worker(worker_id, limit=self._limit))

    def give(self, worker_id: str, lease: Lease, due: Sequence[int]) -> ActiveLease:
        """Put a lease into a worker's hands; it is `sent` once its caller says so."""
        worker = self._known(worker_id)
        active = worker.leases[lease.lease_id] = ActiveLease(lease, set(due), time.monotonic())
        return active

    def update(self, route: bytes, state: WorkerState) -> tuple[list[Lease], list[ActiveLease]]:
        """Take in a worker's state; return what is due of leases that it will not bring, and the
        leases to be sent again.

        A process that replaces another brings nothing of its leases, one that drains nothing that
        it does not list; else what it does not list `UNKNOWN_S` after it was sent was lost on the
        way.
        """
        worker = self._known(state.worker_id)
        now = worker.seen = time.monotonic()
        is_new = worker.process not in ("", state.process)
        worker.route, worker.capacity, worker.metrics = route, state.capacity, state.split_metrics
        worker.process = state.process
        known = set(state.held)
        missing = [active for lease_id, active in worker.leases.items() if lease_id not in known]
        if state.capacity > 0 and not is_new:
            return [], [active for active in missing if now - active.sent > UNKNOWN_S]
        for active in missing:
            del worker.leases[active.lease.lease_id]
        if not (state.capacity or worker.leases):
            del self.by_id[state.worker_id]
        return [active.remaining() for active in missing], []

    def finish(self, worker_id: str, lease_id: str, member: int) -> None:
        """Note that an episode came back: its credit is free."""
        worker = self.by_id.get(worker_id)
        if worker is None:
            return
        worker.seen = time.monotonic()
        active = worker.leases.get(lease_id)
        if active is not None:
            active.due.discard(member)
            if not active.due:
                del worker.leases[lease_id]

    def expire(self) -> Iterator[tuple[Worker, list[Lease]]]:
        """Remove the workers silent for too long; yield each with the leases it loses."""
        limit = time.monotonic() - self.ttl_s
        for worker in [w for w in self.by_id.values() if w.seen < limit]:
            del self.by_id[worker.worker_id]
            yield worker, [active.remaining() for active in worker.leases.values()]

    def most_idle(self) -> Worker | None:
        """Return the worker that wants most, or None if nobody wants anything."""
        worker = max(self.by_id.values(), key=lambda w: w.credit, default=None)
        return worker if worker is not None and worker.credit > 0 else None

    def describe(self) -> str:
        """Say who runs what, and since when the oldest episode runs."""
        running = [(a.given, a.lease, w) for w in self.by_id.values() for a in w.leases.values()]
        if not running:
            names = ", ".join(sorted(self.by_id))
            return "nothing in flight, " + (f"workers: {names}" if names else "no rollout worker")
        busy = [w for w in self.by_id.values() if w.leases]
        shares = ", ".join(f"{w.in_flight} on {w.worker_id}" for w in busy)
        given, lease, owner = min(running, key=lambda each: each[0])
        return (
            f"{sum(w.in_flight for w in busy)} episodes in flight ({shares}), oldest "
            f"{lease.group_id} ({lease.task.task_id}) on {owner.worker_id} "
            f"since {time.monotonic() - given:.1f} s"
        )

    def metrics(self) -> dict[str, float]:
        """Add up the workers' counters, as `rollout/<name>`."""
        total: Counter[str] = Counter()
        for worker in self.by_id.values():
            total.update({f"rollout/{k}": v for k, v in worker.metrics.items()})  # type: ignore[arg-type]
        total["rollout/workers"] = len(self.by_id)
        return {key: float(value) for key, value in total.items()} | self.told()
