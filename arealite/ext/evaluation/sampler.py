"""Samples tasks for `eval` and `collect`, through the collector that training uses.

A finished sample is durable before the next one starts in its place.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from arealite.api.agent import Agent
from arealite.api.episode import Action
from arealite.api.experiment_config import ExperimentConfig
from arealite.api.observation import messages
from arealite.api.rollout_messages import Failure, Lease
from arealite.api.task import Task
from arealite.base.errors import RoleError
from arealite.ext.evaluation.samples import Samples
from arealite.impl.rollout.collector import Agents, Collector, RunEnv
from arealite.system.health.waits import is_cancelled
from arealite.system.ledger.group import FAILURE_WINDOW, back_off_s, too_many_failures


class Job(NamedTuple):
    """One sample of one task."""

    number: int
    """Number of the task."""
    task: Task
    member: int
    """Number of the sample."""


def jobs(tasks: Sequence[Task], n: int, split: str) -> list[Job]:
    """Return the samples of tasks: `n` of each, or in an evaluation as `Task.eval_samples` says."""
    return [
        Job(number, task, member)
        for number, task in enumerate(tasks)
        for member in range(n if split == "train" else task.eval_samples(n))
    ]


class ObservingCollector(Collector):
    """A collector that adds `next_state` to segments."""

    def _make_agents(
        self, part: RunEnv, lease: Lease, member: int, turns: Sequence[bytes]
    ) -> Agents:
        agents = super()._make_agents(part, lease, member, turns)
        for agent in agents.values():
            watch(agent)
        return agents


def watch(agent: Agent) -> None:
    """Add the text of each observation of an agent to its latest turn."""
    act = agent.act

    async def watched(observation: object) -> Action:
        turns = agent.record.turns
        if turns and not turns[-1].next_state:
            with suppress(TypeError):  # an agent may accept other observations than messages
                contents = [message.get("content") for message in messages(observation)]
                lines = [str(content or "") for content in contents]
                turns[-1].next_state = "\n".join(lines)
        return await act(observation)

    setattr(agent, "act", watched)  # noqa: B010  (a method)


@dataclass(eq=False, kw_only=True)
class Sampler:
    """Runs `concurrency` episodes at a time."""

    config: ExperimentConfig
    collector: Collector
    samples: Samples
    split: str
    """"train" samples as training does, "eval-0" as its evaluations do."""
    progress: Callable[[int, int], None] = lambda done, all_: None
    """Called after each sample with the numbers of finished and of all samples."""

    def __post_init__(self) -> None:
        self.failed: Counter[str] = Counter()
        """By source: samples that failed `max_attempts` times. The next run retries them."""
        self._ppo = self.config.trainer.ppo
        self._share = self.config.datapipe.max_failed_share
        # External servers may have no version.
        self._version = -1 if self.config.llm_server.addresses else 0
        self._window: deque[bool] = deque(maxlen=FAILURE_WINDOW)
        self._first: Failure | None = None

    async def run(self, tasks: Sequence[Task], n: int) -> None:
        """Run the missing ones of `jobs`.

        Raises:
            RoleError: more than `datapipe.max_failed_share` of the latest episodes failed.
        """
        finished = self.samples.done()
        all_jobs = jobs(tasks, n, self.split)
        missing = [job for job in all_jobs if (job.number, job.member) not in finished]
        self._all = len(all_jobs)
        self._done = self._all - len(missing)
        queue = iter(missing)
        concurrency = min(self._ppo.collector.concurrency, len(missing))
        async with asyncio.TaskGroup() as working:
            for place in range(concurrency):
                working.create_task(self._work(queue), name=f"samples {place}")

    async def _work(self, queue: Iterator[Job]) -> None:
        """Run jobs one after the other."""
        for job in queue:
            for attempt in range(self._ppo.max_attempts):
                if attempt:
                    await asyncio.sleep(back_off_s(attempt))
                if await self._attempt(job):
                    self._done += 1
                    break
            else:
                self.failed[job.task.source] += 1
            self.progress(self._done, self._all)

    async def _attempt(self, job: Job) -> bool:
        """Run an episode and store it; return False if it failed."""
        group_id = f"{self.split}-{job.number}"
        lease = Lease(
            lease_id=group_id,
            group_id=group_id,
            split=self.split,
            task=job.task,
            members=[job.member],
            version=self._version,
        )
        # A separate task, because an environment may leave it cancelled or swallow a cancellation.
        running = asyncio.create_task(self.collector.run(lease, job.member))
        episode, payloads = await running
        if is_cancelled():
            raise asyncio.CancelledError
        failure = episode.failure
        self._window.append(failure is not None)
        if failure is None:
            await self.samples.add(job.number, episode, payloads)
            return True
        self._first = self._first or failure
        await self.samples.fail(failure)
        reason = too_many_failures(self._window, self._first, share=self._share)
        if reason:
            raise RoleError(reason)
        return False
