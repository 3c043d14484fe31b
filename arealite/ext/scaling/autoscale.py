"""Autoscaling: decide how many episodes run at a time.

The number keeps the servers busy without sampling more than the trainer trains. Of N episodes
in flight, a share g generates, and the others wait for their environment. Servers with a capacity
of C requests reach the utilisation u at N = u·C / g. The autoscaler measures g, so a slow
environment gets more episodes and a fast one fewer. Like Kubernetes' pod autoscaler it sets
desired = current · wanted / measured, which converges in few steps, and ignores small changes.

The code does no I/O, so that a simulation can test whether it converges.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

BAND = 0.1
"""The target does not change by less than this share."""
SMOOTHING = 0.2
"""Weight of a period in the running average of g. New episodes all generate at first, so g is
overestimated if a turn takes longer than five periods."""
STEP = 1.5
"""Largest factor of a change in one period."""
QUEUE = 0.1
"""If the queue always exceeds this share of the running requests, the servers are at capacity,
regardless of the capacity that they report."""
RECOVERY = 1.05
"""Factor per period by which a measured capacity grows again."""
HIGH_SURPLUS = 0.5
"""A surplus is too large above this share of the groups that the staleness bound allows."""
LOW_SURPLUS = 0.1
"""A surplus is too small up to this share of the groups that the staleness bound allows."""
DECREASE = 0.9
"""Factor of the damping after a batch with a large surplus."""
INCREASE = 1.15
"""Factor of the damping after a batch with a small surplus."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Load of servers and datapipe at one moment."""

    running: int
    waiting: int
    """Requests in the servers' queues."""
    capacity: int
    """Requests that the servers can run at a time; 0 if a server does not report it."""
    in_flight: int
    """Episodes that workers run."""


class Autoscaler:
    """Decides the number of concurrent episodes, once a period, from the period's readings."""

    def __init__(self, *, utilisation: float, target: int) -> None:
        self.target = target
        self.damping = 1.0
        """Share of the busy number of episodes that the trainer needs."""
        self._utilisation = utilisation
        self._busy = float(target)
        """Number of episodes that keeps the servers busy."""
        self._share: float | None = None
        """Share of the episodes that generate (g)."""
        self._limit = math.inf
        """Requests that the servers run at a time: the reported or a smaller measured capacity."""

    def decide(
        self,
        readings: Sequence[Reading],
        *,
        least: int,
        most: int,
    ) -> int:
        """Return the number of concurrent episodes for the next period.

        Args:
            readings: The readings of the last period.
            least: Smallest result.
            most: Largest result.
        """
        valid = list[Reading]()
        for reading in readings:
            # Requests that wait while none runs are paused by a weight update.
            is_paused = reading.waiting > 0 and reading.running == 0
            if reading.in_flight and not is_paused:
                valid.append(reading)
        if valid:
            self._update(valid)
            self._busy = min(max(self._busy, least), most)
        # A lower damping has no effect, because `least` bounds the result; it only recovers later.
        self.damping = max(self.damping, least / max(self._busy, least))
        wanted = min(max(self._busy * self.damping, least), most)
        if abs(wanted - self.target) > BAND * self.target or wanted in (least, most):
            self.target = round(wanted)
        return self.target

    def adjust_damping(self, surplus: int, *, allowed: int) -> None:
        """Adjust the damping after the trainer has taken a batch.

        The surplus reacts to a change only after a batch, so this is called once per batch.

        Args:
            surplus: Number of complete groups that are left.
            allowed: Number of groups that the staleness bound allows.
        """
        if surplus > HIGH_SURPLUS * allowed:
            self.damping *= DECREASE
        elif surplus <= LOW_SURPLUS * allowed:
            self.damping = min(1.0, self.damping * INCREASE)

    def _update(self, readings: Sequence[Reading]) -> None:
        """Update the capacity, the share that generates and the busy number of episodes."""
        running = fmean(reading.running for reading in readings)
        waiting = fmean(reading.waiting for reading in readings)
        in_flight = fmean(reading.in_flight for reading in readings)
        capacity = math.inf
        if all(reading.capacity for reading in readings):
            capacity = fmean(reading.capacity for reading in readings)
        shortest_queue = min(reading.waiting for reading in readings)
        if shortest_queue > QUEUE * running:
            self._limit = running
        else:
            self._limit = min(self._limit * RECOVERY, capacity)
        share = (running + waiting) / in_flight
        if self._share is None:
            self._share = share
        self._share += SMOOTHING * (share - self._share)
        wanted_requests = self._utilisation * self._limit
        expected_requests = max(self._share * self._busy, 1e-9)
        ratio = wanted_requests / expected_requests
        self._busy *= min(max(ratio, 1 / STEP), STEP)
