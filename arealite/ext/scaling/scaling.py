"""Adapts the number of episodes of each worker, and requests more or fewer workers.

The datapipe does this because it grants the leases. After a reduction it grants fewer leases, and
the number of running episodes falls as episodes end. The load of each server is read from its entry
in the name registry. The launcher reads the desired number of workers from the datapipe's entry.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.hooks import OpenGroups, WorkerLimits
from arealite.base import log
from arealite.ext.scaling.autoscale import Autoscaler, Reading
from arealite.system.names.name_registry import NameRegistry

logger = log.get(__name__)

CONFIRM_PERIODS = 6
"""Consecutive periods after which a spare worker is removed, or missing loads are reported."""
SPARE = 0.8
"""Share of capacity in use: a worker is removed below it, and added only from it on."""


@dataclass(eq=False, kw_only=True)
class Scaling:
    """Chooses the number of episodes and of workers of one run."""

    config: ExperimentConfig
    registry: NameRegistry
    groups: OpenGroups
    workers: WorkerLimits

    def __post_init__(self) -> None:
        collector = self.config.trainer.ppo.collector
        launcher = self.config.launcher
        self.options = collector.autoscale
        self.max_concurrency = collector.concurrency
        self.min_concurrency = min(self.options.min_concurrency, self.max_concurrency)
        self.min_workers = launcher.rollout_workers
        self.num_workers = 0
        """Desired number of workers; 0 before the first decision."""
        self.max_workers = max(launcher.max_workers, self.min_workers)
        self._sample_s = min(self.config.cluster.heartbeat_s, self.options.period_s)
        target = self.min_concurrency * self.min_workers
        self._scaler = Autoscaler(utilisation=self.options.utilisation, target=target)
        self._readings: list[Reading] = []
        self._step = self.groups.next_step
        self._spare_periods = 0
        """Consecutive periods in which one worker fewer would be enough."""
        self._silent_periods = 0
        """Consecutive periods without a load of any server."""
        self._leaving = ""
        """Id of a worker that gets no leases and is removed when it is idle; "" for none."""
        self.workers.set_limit(self.min_concurrency)
        self.workers.extra_metrics = self.metrics

    def entry(self) -> dict[str, int]:
        """Return {"workers": desired number}; {} before the first decision."""
        return {"workers": self.num_workers} if self.num_workers else {}

    async def run(self, stopped: asyncio.Event) -> None:
        """Read server loads and adapt the numbers until `stopped` is set. Waits for: the clock."""
        decided = time.monotonic()
        while not stopped.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), self._sample_s)
            entries = await asyncio.to_thread(self.registry.list, "llm_server")
            self._sample([entry.value.get("load") for entry in entries])
            if time.monotonic() - decided >= self.options.period_s:
                decided = time.monotonic()
                self._decide()

    def take_batch(self) -> None:
        """Update the damping factor if a batch was composed since the last call."""
        ppo = self.config.trainer.ppo
        next_step = self.groups.next_step
        if next_step > self._step:
            allowed_groups = ppo.max_staleness * ppo.num_groups
            self._scaler.adjust_damping(self.groups.counts["complete"], allowed=allowed_groups)
        self._step = next_step

    def metrics(self) -> dict[str, float]:
        """Return the desired numbers and the damping factor."""
        return {
            "rollout/target_concurrency": float(self._scaler.target),
            "rollout/target_workers": float(self.num_workers),
            "rollout/damping": self._scaler.damping,
        }

    def _sample(self, loads: Sequence[object]) -> None:
        """Add a reading of the servers' loads; a server without a load has another value."""
        reported = cast(list[dict[str, int]], [load for load in loads if isinstance(load, dict)])
        if not reported:
            return
        capacities = [load.get("capacity") or 0 for load in reported]
        reading = Reading(
            running=sum(load["running"] for load in reported),
            waiting=sum(load["waiting"] for load in reported),
            capacity=sum(capacities) if all(capacities) else 0,
            in_flight=self._in_flight,
        )
        self._readings.append(reading)

    @property
    def _in_flight(self) -> int:
        return sum(worker.in_flight for worker in self.workers.by_id.values())

    def _decide(self) -> None:
        """Set the number of episodes of each worker, and the desired number of workers."""
        readings = self._readings
        self._readings = []
        self._silent_periods = 0 if readings else self._silent_periods + 1
        if self._silent_periods == CONFIRM_PERIODS:
            logger.warning("no server reports its load", episodes=self._scaler.target)
        worker_ids = [
            worker.worker_id for worker in self.workers.by_id.values() if worker.route is not None
        ]
        num_staying = sum(worker_id != self._leaving for worker_id in worker_ids)
        num_sharing = max(num_staying, 1)
        previous_target = self._scaler.target
        target = self._scaler.decide(
            readings,
            least=self.min_concurrency * num_sharing,
            most=self.max_concurrency * self.max_workers,
        )
        self._adapt_workers(target, worker_ids)
        share = math.ceil(target / num_sharing)
        limit = min(max(share, self.min_concurrency), self.max_concurrency)
        self.workers.set_limit(limit, leaving=self._leaving)
        if target != previous_target:
            logger.info(
                "concurrency",
                episodes=target,
                before=previous_target,
                workers=num_sharing,
                each=limit,
            )

    def _adapt_workers(self, target: int, worker_ids: list[str]) -> None:
        """Add one worker, or remove the last worker once it is idle; one change at a time."""
        ids_by_index = {worker_index(worker_id): worker_id for worker_id in worker_ids}
        if not self.num_workers:  # an earlier datapipe process may have requested more workers
            num_present = 1 + max(ids_by_index, default=0)
            self.num_workers = min(max(self.min_workers, num_present), self.max_workers)
        last_index = self.num_workers - 1
        is_spare = self._is_last_spare(target, last_index)
        self._spare_periods = self._spare_periods + 1 if is_spare else 0
        is_removed = self._leaving != "" and worker_index(self._leaving) > last_index
        if is_removed:
            if self._leaving not in worker_ids:
                self._leaving = ""
        elif not is_spare:
            self._leaving = ""
            if self._needs_worker(target, len(worker_ids)):
                self.num_workers += 1
        elif self._leaving:
            leaver = self.workers.by_id.get(self._leaving)
            if leaver is None or not leaver.in_flight:
                self.num_workers = last_index
                self._spare_periods = 0
        elif self._spare_periods >= CONFIRM_PERIODS:
            self._leaving = ids_by_index.get(last_index, "")

    def _is_last_spare(self, target: int, last_index: int) -> bool:
        """Return whether the workers before the last can run `target` episodes."""
        if last_index < self.min_workers:
            return False
        return target <= SPARE * self.max_concurrency * last_index

    def _needs_worker(self, target: int, num_present: int) -> bool:
        """Return whether one more worker is needed and allowed.

        If workers are not full, the staleness bound limits the number of episodes.
        """
        if self.num_workers >= self.max_workers or num_present < self.num_workers:
            return False
        capacity = self.max_concurrency * self.num_workers
        are_full = self._in_flight >= SPARE * capacity
        return are_full and target > capacity


def worker_index(worker_id: str) -> int:
    """Return the index in a worker id such as rollout-3@host; -1 if it has none."""
    digits = worker_id.partition("@")[0].rpartition("-")[2]
    return int(digits) if digits.isdecimal() else -1


def scaling_of(
    config: ExperimentConfig,
    registry: NameRegistry,
    groups: OpenGroups,
    workers: WorkerLimits,
) -> Scaling | None:
    """Return the scaling of a datapipe; None if `autoscale` is off."""
    if not config.trainer.ppo.collector.autoscale.enabled:
        return None
    return Scaling(
        config=config,
        registry=registry,
        groups=groups,
        workers=workers,
    )
