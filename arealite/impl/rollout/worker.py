"""A rollout worker: runs hundreds of leased episodes concurrently, and submits their results.

A failed episode is a result like any other. Only a broken invariant or a wrong config ends the
worker.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from typing import TYPE_CHECKING

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.llm import LLMClient
from arealite.api.rollout_messages import Episode, Lease, root_error
from arealite.base import log
from arealite.base.signals import STOP
from arealite.impl.rollout.collector import Collector, EpisodeKey
from arealite.system.health import vitals, waits
from arealite.system.health.waits import END_S

if TYPE_CHECKING:
    from arealite.api.tokenizer import Tokenizer
    from arealite.system.links.worker_link import WorkerLink

logger = log.get(__name__)

DRAIN_GRACE_S = 2.0
"""When the run ends, running episodes have this long to finish before they are aborted."""


class RolloutWorker:
    """Runs leased episodes until the datapipe drains the worker or SIGTERM arrives."""

    def __init__(
        self,
        config: ExperimentConfig,
        *,
        link: WorkerLink,
        client: LLMClient,
        tokenizer: Tokenizer,
    ) -> None:
        self.link = link
        self.client = client
        self._collector = Collector(config, client, tokenizer)
        self._capacity = config.trainer.ppo.collector.concurrency
        self._running: dict[EpisodeKey, asyncio.Task[None]] = {}
        self._counters: defaultdict[str, float] = defaultdict(float)

    async def run(self) -> None:
        """Run leases; return when drained and every result is acknowledged.

        Raises:
            InvariantError, UserError: an invariant is broken, or the config is wrong.
            RoleError: the datapipe cannot be reached.
        """
        self.link.metrics = self.metrics
        self.link.progress = self._collector.progress
        try:
            await self.client.start()
            await self._collector.setup()
            try:
                await self._serve()
            except BaseExceptionGroup as group:
                raise root_error(group) from group
            finally:
                await self._collector.close()
        finally:
            await self.client.close()

    def metrics(self) -> dict[str, float]:
        """Return counters since the start: of episodes, of seconds waited, and of the client."""
        client_stats = self.client.stats()
        return {
            **self._counters,
            **self._collector.resumed,
            "loop_lag_max_s": vitals.lag_max_s(),
            **{f"client_{name}": number for name, number in client_stats.items()},
            "running": float(len(self._running)),
        }

    async def _serve(self) -> None:
        """Run the link and the leased episodes; drain at the end of the run or after SIGTERM."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.link.run(), name="worker link")
            async with asyncio.TaskGroup() as episodes:
                leasing = episodes.create_task(self._run_leases(episodes), name="leases")
                loop.add_signal_handler(STOP, leasing.cancel)
                await asyncio.wait((leasing,))
                await self._drain()
            self.link.drain()
        loop.remove_signal_handler(STOP)

    async def _run_leases(self, episodes: asyncio.TaskGroup) -> None:
        """Request leases and start their episodes, until the datapipe has no more leases."""
        while True:
            begin = time.perf_counter()
            is_idle = len(self._running) < self._capacity
            lease = await self.link.next_lease()
            if is_idle:
                self._counters["lease_wait_s"] += time.perf_counter() - begin
            if lease is None:
                return
            turns = self.link.take_turns(lease) if lease.turns else []
            for member in lease.members:
                key = (lease.lease_id, member)
                if key in self._running:
                    continue  # the lease was sent twice
                episode = self._run_member(lease, member, turns)
                task = episodes.create_task(episode, name=f"episode {lease.group_id}/{member}")
                self._running[key] = task
                task.add_done_callback(lambda _, key=key: self._running.pop(key))

    async def _run_member(self, lease: Lease, member: int, turns: list[bytes]) -> None:
        """Run one episode, and submit its result; the link resends it until it is acknowledged."""
        episode, payloads = await self._collector.run(lease, member, turns)
        self.link.submit(episode, payloads)
        self._count_episode(episode, lease.task.source)

    async def _drain(self) -> None:
        """Give episodes DRAIN_GRACE_S to finish, then abort the rest without a result."""
        if self._running:
            await asyncio.wait(self._running.values(), timeout=DRAIN_GRACE_S)
        unfinished = [*self._running.values()]
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.wait(unfinished, timeout=END_S)
            self._collector.abandon_running()
        logger.info("drained", aborted=len(unfinished), episodes=self._counters["episodes"])

    def _count_episode(self, episode: Episode, source: str) -> None:
        counters = self._counters
        counters["episodes"] += 1
        if episode.failure is not None:
            failure_counter = f"failed_{episode.failure.failure_class}"
            counters[failure_counter] += 1
            # The counter is shown even when no step completes.
            waits.counters[failure_counter] = counters[failure_counter]
            if source:
                counters[f"{failure_counter}/{source}"] += 1
        for header in episode.headers:
            counters["interruptions"] += header.interruptions
            counters["tokens"] += header.trained_tokens
            for phase, seconds in header.waits.items():
                counters[f"{phase}_wait_s"] += seconds
