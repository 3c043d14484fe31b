"""Knows the rollout workers: how to reach each, what it runs, and how much more it wants.

Credit is level-triggered: a worker tells what it holds, and what it should hold besides is sent
again, so a lost message costs a second and never an episode.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from arealite.api.rollout_messages import Lease, WorkerState

RESEND_S = 1.0
"""A lease that a worker does not report is sent again after this long."""


@dataclass
class Held:
    """A lease in a worker's hands."""

    lease: Lease
    due: set[int]
    given: float
    sent: float


@dataclass
class Worker:
    """One rollout worker."""

    worker_id: str
    route: bytes | None = None
    capacity: int = 0
    seen: float = field(default_factory=time.monotonic)
    held: dict[str, Held] = field(default_factory=dict[str, Held])
    metrics: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def in_flight(self) -> int:
        """Episodes it runs."""
        return sum(len(held.due) for held in self.held.values())

    @property
    def credit(self) -> int:
        """Episodes it wants besides."""
        return self.capacity - self.in_flight if self.route is not None else 0


class Workers:
    """All workers heard of within the time to live of a lease."""

    def __init__(self, *, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self.by_id: dict[str, Worker] = {}

    def restore(self, worker_id: str, lease: Lease, due: list[int]) -> None:
        """Take over a lease given before a restart; its worker has `ttl_s` to show up."""
        worker = self.by_id.setdefault(worker_id, Worker(worker_id))
        now = time.monotonic()
        worker.held[lease.lease_id] = Held(lease, set(due), now, now)

    def update(self, route: bytes, state: WorkerState) -> tuple[list[Lease], list[Lease]]:
        """Take in a worker's state; return (leases to send it again, leases it gave up)."""
        worker = self.by_id.setdefault(state.worker_id, Worker(state.worker_id))
        now = worker.seen = time.monotonic()
        worker.route, worker.capacity, worker.metrics = route, state.capacity, state.split_metrics
        known = set(state.held)
        missing = [held for key, held in worker.held.items() if key not in known and held.due]
        if state.capacity == 0:
            for held in missing:
                del worker.held[held.lease.lease_id]
            if not known:
                del self.by_id[state.worker_id]
            return [], [held.lease for held in missing]
        late = [held for held in missing if now - held.sent > RESEND_S]
        for held in late:
            held.sent = now
        return [_rest(held) for held in late], []

    def give(self, worker: Worker, lease: Lease) -> None:
        """Put a new lease into a worker's hands."""
        now = time.monotonic()
        worker.held[lease.lease_id] = Held(lease, set(lease.members), now, now)

    def finish(self, worker_id: str, lease_id: str, member: int) -> None:
        """Note that an episode came back: its credit is free."""
        worker = self.by_id.get(worker_id)
        if worker is None:
            return
        worker.seen = time.monotonic()
        held = worker.held.get(lease_id)
        if held is not None:
            held.due.discard(member)
            if not held.due:
                del worker.held[lease_id]

    def expire(self) -> Iterator[tuple[Worker, list[Lease]]]:
        """Remove the workers silent for too long; yield each with the leases it loses."""
        limit = time.monotonic() - self.ttl_s
        for worker in [w for w in self.by_id.values() if w.seen < limit]:
            del self.by_id[worker.worker_id]
            yield worker, [held.lease for held in worker.held.values()]

    def most_idle(self) -> Worker | None:
        """Return the worker that wants most, or None if nobody wants anything."""
        worker = max(self.by_id.values(), key=lambda w: w.credit, default=None)
        return worker if worker is not None and worker.credit > 0 else None

    def describe(self) -> str:
        """Say who runs what, and since when the oldest episode runs."""
        busy = [w for w in self.by_id.values() if w.held]
        if not busy:
            return "nothing in flight, " + (
                f"workers: {', '.join(sorted(self.by_id))}" if self.by_id else "no rollout worker"
            )
        running = ", ".join(f"{w.in_flight} on {w.worker_id}" for w in busy)
        held, owner = min(
            ((held, w) for w in busy for held in w.held.values()), key=lambda pair: pair[0].given
        )
        seconds = time.monotonic() - held.given
        return (
            f"{sum(w.in_flight for w in busy)} episodes in flight ({running}), oldest "
            f"{held.lease.group_id} ({held.lease.task.task_id}) on {owner.worker_id} "
            f"since {seconds:.1f} s"
        )

    def metrics(self) -> dict[str, float]:
        """Add up the workers' counters, as `rollout/<name>`."""
        total: Counter[str] = Counter()
        for worker in self.by_id.values():
            total.update({f"rollout/{k}": v for k, v in worker.metrics.items()})  # type: ignore[arg-type]
        return {key: float(value) for key, value in total.items()}


def _rest(held: Held) -> Lease:
    lease = held.lease
    return Lease(
        *(lease.lease_id, lease.group_id, lease.split, lease.task),
        *(sorted(held.due), lease.version),
    )
