"""Tracks the rollout workers: the route to each, its leases, and its free capacity (credit).

Each state message of a worker lists all its leases. A lease that is missing from the list was lost
with a message or a restart. It is sent again, or its members are leased again. No episode is lost.
"""

import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from arealite.api.rollout_messages import Lease, WorkerState

LEASE_ARRIVAL_S = 3.0
"""A lease that a worker does not list this long after it was sent is sent again."""


@dataclass(kw_only=True)
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


@dataclass(kw_only=True)
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
        if self.route is None:
            return 0
        return min(self.capacity, self.limit) - self.in_flight


class Workers:
    """All workers that sent a message within `ttl_s` seconds."""

    def __init__(self, *, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self.by_id: dict[str, Worker] = {}
        self._limit = sys.maxsize
        self.extra_metrics: Callable[[], dict[str, float]] = dict[str, float]
        """Further metrics, from a control of the datapipe."""

    def set_limit(self, limit: int, *, leaving: str = "") -> None:
        """Limit the number of episodes of each worker.

        Args:
            limit: Maximum number of episodes of a worker.
            leaving: Id of a worker that gets no further episodes.
        """
        self._limit = limit
        for worker in self.by_id.values():
            worker.limit = 0 if worker.worker_id == leaving else limit

    def _get_or_add(self, worker_id: str) -> Worker:
        return self.by_id.setdefault(worker_id, Worker(worker_id=worker_id, limit=self._limit))

    def assign(
        self,
        worker_id: str,
        lease: Lease,
        due: Sequence[int],
    ) -> ActiveLease:
        """Assign a lease to a worker. The caller sends the lease and sets `sent_at`.

        Args:
            worker_id: The worker.
            lease: The lease.
            due: Members that the worker has to finish.
        """
        worker = self._get_or_add(worker_id)
        active = ActiveLease(
            lease=lease,
            unfinished=set(due),
            assigned_at=time.monotonic(),
        )
        worker.leases[lease.lease_id] = active
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
        worker = self._get_or_add(state.worker_id)
        now = time.monotonic()
        was_restarted = worker.process not in ("", state.process)
        worker.last_seen = now
        worker.route = route
        worker.capacity = state.capacity
        worker.metrics = state.split_metrics
        worker.process = state.process
        listed_ids = set(state.held)
        missing = [
            active for lease_id, active in worker.leases.items() if lease_id not in listed_ids
        ]
        is_draining = state.capacity == 0
        if not is_draining and not was_restarted:
            to_resend = [active for active in missing if now - active.sent_at > LEASE_ARRIVAL_S]
            return [], to_resend
        for active in missing:
            del worker.leases[active.lease.lease_id]
        if is_draining and not worker.leases:
            del self.by_id[state.worker_id]
        return [active.remaining() for active in missing], []

    def finish(self, worker_id: str, lease_id: str, member: int) -> None:
        """Free the credit of a finished episode."""
        worker = self.by_id.get(worker_id)
        if worker is None:
            return
        worker.last_seen = time.monotonic()
        active = worker.leases.get(lease_id)
        if active is None:
            return
        active.unfinished.discard(member)
        if not active.unfinished:
            del worker.leases[lease_id]

    def expire(self) -> Iterator[tuple[Worker, list[Lease]]]:
        """Remove the workers that were silent for `ttl_s`; yield each with its lost leases."""
        limit = time.monotonic() - self.ttl_s
        silent = [worker for worker in self.by_id.values() if worker.last_seen < limit]
        for worker in silent:
            del self.by_id[worker.worker_id]
            lost_leases = [active.remaining() for active in worker.leases.values()]
            yield worker, lost_leases

    def most_idle(self) -> Worker | None:
        """Return the worker with the most credit; None if no worker has credit."""
        worker = max(
            self.by_id.values(),
            key=lambda worker: worker.credit,
            default=None,
        )
        if worker is None or worker.credit <= 0:
            return None
        return worker

    def describe(self) -> str:
        """Return a text with the number of episodes of each worker and the oldest episode."""
        busy = [worker for worker in self.by_id.values() if worker.leases]
        if not busy:
            names = ", ".join(sorted(self.by_id))
            workers = f"workers: {names}" if names else "no rollout worker"
            return f"nothing in flight, {workers}"
        total = sum(worker.in_flight for worker in busy)
        shares = ", ".join(f"{worker.in_flight} on {worker.worker_id}" for worker in busy)
        active_leases = [(worker, active) for worker in busy for active in worker.leases.values()]
        owner, oldest = min(active_leases, key=lambda pair: pair[1].assigned_at)
        lease = oldest.lease
        age_s = time.monotonic() - oldest.assigned_at
        return (
            f"{total} episodes in flight ({shares}), oldest {lease.group_id} "
            f"({lease.task.task_id}) on {owner.worker_id} since {age_s:.1f} s"
        )

    def metrics(self) -> dict[str, float]:
        """Sum the counters of all workers, as `rollout/<name>`."""
        totals: defaultdict[str, float] = defaultdict(float)
        for worker in self.by_id.values():
            for name, count in worker.metrics.items():
                totals[f"rollout/{name}"] += count
        totals["rollout/workers"] = float(len(self.by_id))
        return dict(totals) | self.extra_metrics()
