"""Decides how many episodes run at a time: enough to keep servers busy, no more than is trained.

Pure, because whether it settles is a question for simulations and not for a cluster. Of N episodes
in flight a share g generates, the others wait for their environment; servers with room for C
requests are busy at u·C of them when N = u·C / g. As g is measured while it runs, a slow
environment gets more episodes and a fast one fewer; like Kubernetes' pod autoscaler (desired =
current · wanted / measured) it lands there in few steps and rests within a band.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

BAND = 0.1
"""Changes of less than this share are not made."""
SMOOTHING = 0.2
"""Weight of a period in the average of g: new episodes all generate at first, so it is misread
where a turn takes longer than five periods."""
STEP = 1.5
"""Most by which one period multiplies or divides."""
QUEUE = 0.1
"""Servers at which, all the time, more than this share of what runs waits take no more, whatever
they tell."""
RECOVERY = 1.05
"""How fast that is tried again, a period."""
FULL, EMPTY = 0.5, 0.1
"""Of what the staleness bound lets wait after a batch: above, too much; below, too little."""
LESS, MORE = 0.9, 1.15
"""Factors by which a batch changes how much is rolled out then."""


@dataclass(frozen=True)
class Reading:
    """What servers and datapipe were like at one moment."""

    running: int
    waiting: int
    """Requests in the servers' queues."""
    capacity: int
    """Requests that they can run at a time; 0 where one does not tell."""
    in_flight: int
    """Episodes that workers run."""


class Autoscaler:
    """How many episodes are to run, decided once a period from the readings in it."""

    def __init__(self, *, utilisation: float, target: int) -> None:
        self.target = target
        self.damping = 1.0
        """Share of what would keep servers busy that the trainer has use for."""
        self._utilisation = utilisation
        self._busy = float(target)
        """Episodes that keep servers busy."""
        self._share: float | None = None
        """Of episodes, which generate."""
        self._limit = math.inf
        """Requests that servers do run at a time, where that is less than they tell."""

    def decide(self, readings: Sequence[Reading], *, least: int, most: int) -> int:
        """Return how many episodes are to run in the next period."""
        # What waits while nothing runs, waits for new weights.
        told = [r for r in readings if r.in_flight and (r.running or not r.waiting)]
        if told:
            self._learn(told)
            self._busy = min(max(self._busy, least), most)
        # No less than has an effect, or it would take as long to come back.
        self.damping = max(self.damping, least / max(self._busy, least))
        wanted = min(max(self._busy * self.damping, least), most)
        if abs(wanted - self.target) > BAND * self.target or wanted in (least, most):
            self.target = round(wanted)
        return self.target

    def take_batch(self, surplus: int, *, allowed: int) -> None:
        """Note that a batch was taken, after which `surplus` groups are left of those `allowed`.

        Once a batch and not once a period: a buffer answers a change no sooner.
        """
        if surplus > FULL * allowed:
            self.damping *= LESS
        elif surplus <= EMPTY * allowed:
            self.damping = min(1.0, self.damping * MORE)

    def _learn(self, readings: Sequence[Reading]) -> None:
        running, waiting = fmean(r.running for r in readings), fmean(r.waiting for r in readings)
        told = fmean(r.capacity for r in readings) if all(r.capacity for r in readings) else None
        if min(r.waiting for r in readings) > QUEUE * running:
            self._limit = running
        else:
            self._limit = min(self._limit * RECOVERY, math.inf if told is None else told)
        share = (running + waiting) / fmean(r.in_flight for r in readings)
        self._share = share if self._share is None else self._share
        self._share += SMOOTHING * (share - self._share)
        ratio = self._utilisation * self._limit / max(self._share * self._busy, 1e-9)
        self._busy *= min(max(ratio, 1 / STEP), STEP)
