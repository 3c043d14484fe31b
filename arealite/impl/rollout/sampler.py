"""Samples tasks for `eval` and `collect`, through the collector that training uses.

A finished sample is durable before the next one starts in its place.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

from arealite.api.config import ExperimentConfig
from arealite.api.rollout_messages import Failure, Lease
from arealite.api.task import Task
from arealite.base.errors import RoleError
from arealite.impl.rollout.collector import Collector
from arealite.system.data.samples import Samples
from arealite.system.datapipe.group_store import FAILURE_WINDOW
from arealite.system.health.waits import is_cancelled
from arealite.system.ledger.group import back_off_s, too_many_failures

Job = tuple[int, Task, int]
"""(number of the task, the task, number of the sample)."""


class Sampler:
    """Runs `concurrency` episodes at a time."""

    def __init__(
        self,
        config: ExperimentConfig,
        *,
        collector: Collector,
        samples: Samples,
        split: str,
        progress: Callable[[int, int], None] = lambda done, all_: None,
    ) -> None:
        self.collector = collector
        self.samples = samples
        self.split = split
        """"train" samples as training does, "eval-0" as its evaluations do."""
        self.failed: Counter[str] = Counter()
        """By source: samples that failed `max_attempts` times. The next run retries them."""
        self._ppo, self._share = config.trainer.ppo, config.datapipe.max_failed_share
        # External servers may have no version.
        self._version = -1 if config.llm_server.addresses else 0
        self._window: deque[bool] = deque(maxlen=FAILURE_WINDOW)
        self._first: Failure | None = None
        self._progress = progress

    async def run(self, tasks: Sequence[Task], n: int) -> None:
        """Sample each task `n` times; samples that exist already are kept.

        Raises:
            RoleError: more than `datapipe.max_failed_share` of the latest episodes failed.
        """
        done = self.samples.done()
        jobs = [
            (number, task, member)
            for number, task in enumerate(tasks)
            for member in range(n)
            if (number, member) not in done
        ]
        self._all = len(tasks) * n
        self._done = self._all - len(jobs)
        left = iter(jobs)
        async with asyncio.TaskGroup() as working:
            for place in range(min(self._ppo.collector.concurrency, len(jobs))):
                working.create_task(self._work(left), name=f"samples {place}")

    async def _work(self, jobs: Iterator[Job]) -> None:
        """Run jobs one after the other."""
        for job in jobs:
            for attempt in range(self._ppo.max_attempts):
                if attempt:
                    await asyncio.sleep(back_off_s(attempt))
                if await self._attempt(*job):
                    self._done += 1
                    break
            else:
                self.failed[job[1].source] += 1
            self._progress(self._done, self._all)

    async def _attempt(self, number: int, task: Task, member: int) -> bool:
        """Run an episode and store it; return False if it failed."""
        group = f"{self.split}-{number}"
        lease = Lease(group, group, self.split, task, [member], self._version)
        # A separate task, because an environment may leave it cancelled or swallow a cancellation.
        episode, payloads = await asyncio.create_task(self.collector.run(lease, member))
        if is_cancelled():
            raise asyncio.CancelledError
        self._window.append(episode.failure is not None)
        if episode.failure is None:
            await self.samples.add(number, episode, payloads)
            return True
        self._first = self._first or episode.failure
        await self.samples.fail(episode.failure)
        if why := too_many_failures(self._window, self._first, share=self._share):
            raise RoleError(why)
        return False
