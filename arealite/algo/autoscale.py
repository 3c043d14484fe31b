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
HIGH_SURPLUS, LOW_SURPLUS = 0.5, 0.1
"""Shares of the groups that the staleness bound allows after a batch. A surplus above the first is
too large, one below the second is too small."""
DECREASE, INCREASE = 0.9, 1.15
"""Factors of the damping after a batch with a large and a small surplus."""


@dataclass(frozen=True)
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

    def decide(self, readings: Sequence[Reading], *, least: int, most: int) -> int:
        """Return the number of concurrent episodes for the next period.

        Args:
            readings: The readings of the last period.
            least: Smallest result.
            most: Largest result.
        """
        # Requests that wait while none runs are paused by a weight update: skip these readings.
        if valid := [r for r in readings if r.in_flight and (r.running or not r.waiting)]:
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
        running = fmean(r.running for r in readings)
        waiting = fmean(r.waiting for r in readings)
        capacity = math.inf
        if all(r.capacity for r in readings):
            capacity = fmean(r.capacity for r in readings)
        if min(r.waiting for r in readings) > QUEUE * running:
            self._limit = running
        else:
            self._limit = min(self._limit * RECOVERY, capacity)
        share = (running + waiting) / fmean(r.in_flight for r in readings)
        self._share = share if self._share is None else self._share
        self._share += SMOOTHING * (share - self._share)
        ratio = self._utilisation * self._limit / max(self._share * self._busy, 1e-9)
        self._busy *= min(max(ratio, 1 / STEP), STEP)
