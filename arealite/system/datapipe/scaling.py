"""Adapts how many episodes each worker runs, and asks the launcher for more workers or fewer.

In the datapipe, because whoever gives leases decides how many are held: a smaller number is reached
as episodes end, and nobody has to be told. Servers are read off the name registry, where each tells
its load with its heartbeat.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from typing import Any, cast

from arealite.algo.autoscale import Autoscaler, Reading
from arealite.api.config import ExperimentConfig
from arealite.base import log
from arealite.system.datapipe.group_store import GroupStore
from arealite.system.datapipe.workers import Workers
from arealite.system.names.registry import NameRegistry

logger = log.get(__name__)

PATIENCE = 6
"""Periods in a row that could do with one worker less before it is let go."""
SPARE = 0.8
"""How full the others may be then, and how full all are when one more is asked for."""


class Scaling:
    """The number of episodes and of workers of one run."""

    def __init__(
        self,
        config: ExperimentConfig,
        registry: NameRegistry,
        *,
        store: GroupStore,
        workers: Workers,
    ) -> None:
        collector, launcher = config.trainer.ppo.collector, config.launcher
        self.options, self.most = collector.autoscale, collector.concurrency
        self.least = min(self.options.min_concurrency, self.most)
        self.fewest = launcher.rollout_workers
        self.count = 0
        """Workers that the launcher is to keep, numbered from 0; 0: not decided yet."""
        self.highest = max(launcher.max_workers, self.fewest)
        self._sample_s = min(config.cluster.heartbeat_s, self.options.period_s)
        self._registry, self._store, self._workers = registry, store, workers
        self._scaler = Autoscaler(
            utilisation=self.options.utilisation, target=self.least * self.fewest
        )
        self._readings: list[Reading] = []
        self._step = store.next_step
        self._spare = 0
        """Periods in a row that could do with less."""
        self._untold = 0
        """Periods in a row without a reading."""
        self._leaving = ""
        """Id of a worker that gets nothing new, until it is gone."""
        workers.scale(self.least)
        workers.told = self.metrics

    def wish(self) -> dict[str, int]:
        """Return how many workers the launcher is to keep, once that is decided."""
        return {"workers": self.count} if self.count else {}

    async def run(self, over: asyncio.Event) -> None:
        """Read loads and decide until the run is over. Waits for: the clock."""
        decided = time.monotonic()
        while not over.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), self._sample_s)
            found = await asyncio.to_thread(self._registry.list, "llm_server")
            self._sample([entry.value.get("load") for entry in found])
            if time.monotonic() - decided >= self.options.period_s:
                decided = time.monotonic()
                self._decide()

    def take_batch(self) -> None:
        """Notice a batch that was composed since the last call."""
        store = self._store
        if store.next_step > self._step:
            allowed = store.ppo.max_staleness * store.ppo.num_groups
            self._scaler.adjust_damping(store.counts["complete"], allowed=allowed)
        self._step = store.next_step

    def metrics(self) -> dict[str, float]:
        """Return what was decided."""
        return {
            "rollout/target_concurrency": float(self._scaler.target),
            "rollout/target_workers": float(self.count),
            "rollout/damping": self._scaler.damping,
        }

    def _sample(self, loads: list[Any]) -> None:
        told = cast(list[dict[str, int]], [load for load in loads if isinstance(load, dict)])
        if not told:
            return
        capacities = [load.get("capacity") or 0 for load in told]
        self._readings.append(
            Reading(
                sum(load["running"] for load in told),
                sum(load["waiting"] for load in told),
                sum(capacities) if all(capacities) else 0,
                self._in_flight,
            )
        )

    @property
    def _in_flight(self) -> int:
        return sum(worker.in_flight for worker in self._workers.by_id.values())

    def _decide(self) -> None:
        readings, self._readings = self._readings, []
        self._untold = 0 if readings else self._untold + 1
        if self._untold == PATIENCE:
            logger.warning("no server tells its load", episodes=self._scaler.target)
        names = [w.worker_id for w in self._workers.by_id.values() if w.route is not None]
        staying = [name for name in names if name != self._leaving]
        before, workers = self._scaler.target, max(len(staying), 1)
        target = self._scaler.decide(
            readings, least=self.least * workers, most=self.most * self.highest
        )
        self._count(target, names)
        each = min(max(math.ceil(target / workers), self.least), self.most)
        self._workers.scale(each, leaving=self._leaving)
        if target != before:
            logger.info("concurrency", episodes=target, before=before, workers=workers, each=each)

    def _count(self, target: int, names: list[str]) -> None:
        """Ask for one worker more, or let the last one go once it is idle; one at a time."""
        found = {number(name): name for name in names}
        if not self.count:  # the launcher may have started more for a datapipe before this one
            self.count = min(max(self.fewest, 1 + max(found, default=0)), self.highest)
        last = self.count - 1
        is_spare = target <= SPARE * self.most * last and last >= self.fewest
        self._spare = self._spare + 1 if is_spare else 0
        if self._leaving and number(self._leaving) > last:
            if self._leaving not in names:
                self._leaving = ""
        elif not is_spare:
            self._leaving = ""
            most, are_here = self.most * self.count, len(names) >= self.count
            # Else not workers but the staleness bound holds more episodes back.
            are_full = self._in_flight >= SPARE * most
            if target > most and are_full and are_here and self.count < self.highest:
                self.count += 1
        elif self._leaving:
            leaver = self._workers.by_id.get(self._leaving)
            if leaver is None or not leaver.in_flight:
                self.count, self._spare = last, 0
        elif self._spare >= PATIENCE:
            self._leaving = found.get(last, "")


def number(worker_id: str) -> int:
    """Return the place of a worker among others, as in rollout-3@host; -1 where it has none."""
    digits = worker_id.partition("@")[0].rpartition("-")[2]
    return int(digits) if digits.isdecimal() else -1
