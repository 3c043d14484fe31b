"""Tracks the rollout workers: the route to each, its leases, and its free capacity (credit).

Each state message of a worker lists all its leases. A lease that is missing from the list was lost
with a message or a restart. It is sent again, or its members are leased again. No episode is lost.
"""

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from arealite.api.rollout_messages import Lease, WorkerState

LEASE_ARRIVAL_S = 3.0
"""A lease that a worker does not list this long after it was sent is sent again."""


@dataclass
class ActiveLease:
    """A lease in use by a worker. Its group may be filtered before the lease ends."""

    lease: Lease
    unfinished: set[int]
    """Members that the worker has not finished."""
    assigned_at: float
    """Monotonic time at which the lease was assigned to the worker."""
    sent_at: float = math.inf
    """Monotonic time at which the lease was last sent; inf before the first time."""

    def remaining(self) -> Lease:
        """Return the lease with only its unfinished members."""
        return msgspec.structs.replace(self.lease, members=sorted(self.unfinished))


@dataclass
class Worker:
    """One rollout worker."""

    worker_id: str
    process: str = ""
    """Process id string of its last state; "" before the first."""
    route: bytes | None = None
    """ZeroMQ identity to send to; None until its first message."""
    capacity: int = 0
    last_seen: float = field(default_factory=time.monotonic)
    leases: dict[str, ActiveLease] = field(default_factory=dict[str, ActiveLease])
    metrics: dict[str, float] = field(default_factory=dict[str, float])

    limit: int = sys.maxsize
    """Maximum number of episodes, if that is less than `capacity`."""

    @property
    def in_flight(self) -> int:
        """Number of episodes that the worker runs."""
        return sum(len(active.unfinished) for active in self.leases.values())

    @property
    def credit(self) -> int:
        """Number of further episodes that the worker may get."""
        return min(self.capacity, self.limit) - self.in_flight if self.route is not None else 0


class Workers:
    """All workers that sent a message within `ttl_s` seconds."""

    def __init__(self, *, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self.by_id: dict[str, Worker] = {}
        self._limit = sys.maxsize
        self.extra_metrics: Callable[[], dict[str, float]] = dict[str, float]
        """Further metrics, from `Scaling`."""

    def set_limit(self, limit: int, *, leaving: str = "") -> None:
        """Limit the number of episodes of each worker.

        Args:
            limit: Maximum number of episodes of a worker.
            leaving: Id of a worker that gets no further episodes.
        """
        self._limit = limit
        for worker in self.by_id.values():
            worker.limit = 0 if worker.worker_id == leaving else limit

    def _known(self, worker_id: str) -> Worker:
        return self.by_id.setdefault(worker_id, Worker(worker_id, limit=self._limit))

    def assign(self, worker_id: str, lease: Lease, due: Sequence[int]) -> ActiveLease:
        """Assign a lease to a worker. The caller sends the lease and sets `sent_at`.

        Args:
            worker_id: The worker.
            lease: The lease.
            due: Members that the worker has to finish.
        """
        worker = self._known(worker_id)
        active = worker.leases[lease.lease_id] = ActiveLease(lease, set(due), time.monotonic())
        return active

    def update(self, route: bytes, state: WorkerState) -> tuple[list[Lease], list[ActiveLease]]:
        """Apply the state message of a worker.

        A restarted worker has lost the leases of its previous process, and a draining worker does
        not accept leases that it does not list. From any other worker, a lease that is missing
        `LEASE_ARRIVAL_S` after it was sent was lost on the way.

        Args:
            route: The worker's ZeroMQ identity.
            state: The message.

        Returns:
            The leases that the worker will not finish, and the leases to send again.
        """
        worker = self._known(state.worker_id)
        now = worker.last_seen = time.monotonic()
        is_new = worker.process not in ("", state.process)
        worker.route = route
        worker.capacity = state.capacity
        worker.metrics = state.split_metrics
        worker.process = state.process
        known = set(state.held)
        missing = [active for lease_id, active in worker.leases.items() if lease_id not in known]
        if state.capacity > 0 and not is_new:
            return [], [active for active in missing if now - active.sent_at > LEASE_ARRIVAL_S]
        for active in missing:
            del worker.leases[active.lease.lease_id]
        if not (state.capacity or worker.leases):
            del self.by_id[state.worker_id]
        return [active.remaining() for active in missing], []

    def finish(self, worker_id: str, lease_id: str, member: int) -> None:
        """Free the credit of a finished episode."""
        if (worker := self.by_id.get(worker_id)) is None:
            return
        worker.last_seen = time.monotonic()
        if (active := worker.leases.get(lease_id)) is not None:
            active.unfinished.discard(member)
            if not active.unfinished:
                del worker.leases[lease_id]

    def expire(self) -> Iterator[tuple[Worker, list[Lease]]]:
        """Remove the workers that were silent for `ttl_s`; yield each with its lost leases."""
        limit = time.monotonic() - self.ttl_s
        for worker in [w for w in self.by_id.values() if w.last_seen < limit]:
            del self.by_id[worker.worker_id]
            yield worker, [active.remaining() for active in worker.leases.values()]

    def most_idle(self) -> Worker | None:
        """Return the worker with the most credit; None if no worker has credit."""
        worker = max(self.by_id.values(), key=lambda w: w.credit, default=None)
        return worker if worker is not None and worker.credit > 0 else None

    def describe(self) -> str:
        """Return a text with the number of episodes of each worker and the oldest episode."""
        runs = [(a.assigned_at, a.lease, w) for w in self.by_id.values() for a in w.leases.values()]
        if not runs:
            names = ", ".join(sorted(self.by_id))
            return "nothing in flight, " + (f"workers: {names}" if names else "no rollout worker")
        busy = [w for w in self.by_id.values() if w.leases]
        shares = ", ".join(f"{w.in_flight} on {w.worker_id}" for w in busy)
        assigned, lease, owner = min(runs, key=lambda each: each[0])
        text = f"{sum(w.in_flight for w in busy)} episodes in flight ({shares})"
        oldest = f"{lease.group_id} ({lease.task.task_id}) on {owner.worker_id}"
        return f"{text}, oldest {oldest} since {time.monotonic() - assigned:.1f} s"

    def metrics(self) -> dict[str, float]:
        """Sum the counters of all workers, as `rollout/<name>`."""
        total: Counter[str] = Counter()
        for worker in self.by_id.values():
            total.update({f"rollout/{k}": v for k, v in worker.metrics.items()})  # type: ignore[arg-type]
        total["rollout/workers"] = len(self.by_id)
        return {key: float(value) for key, value in total.items()} | self.extra_metrics()
