"""Samples tasks for `eval` and `collect`, through the collector that training uses.

A finished sample is durable before the next one starts in its place.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass

from arealite.api.agent import Agent
from arealite.api.config import ExperimentConfig
from arealite.api.episode import Action
from arealite.api.observation import messages
from arealite.api.rollout_messages import Failure, Lease
from arealite.api.task import Task
from arealite.base.errors import RoleError
from arealite.impl.rollout.collector import Agents, Collector, Part
from arealite.system.data.samples import Samples
from arealite.system.datapipe.group_store import FAILURE_WINDOW
from arealite.system.health.waits import is_cancelled
from arealite.system.ledger.group import back_off_s, too_many_failures

Job = tuple[int, Task, int]
"""(number of the task, the task, number of the sample)."""


class ObservingCollector(Collector):
    """A collector that adds `next_state` to segments."""

    def _make_agents(self, part: Part, lease: Lease, member: int, turns: Sequence[bytes]) -> Agents:
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
                texts = [str(each.get("content") or "") for each in messages(observation)]
                turns[-1].next_state = "\n".join(texts)
        return await act(observation)

    setattr(agent, "act", watched)  # noqa: B010  (a method)


@dataclass(eq=False)
class Sampler:
    """Runs `concurrency` episodes at a time."""

    config: ExperimentConfig
    _: KW_ONLY
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
        """Sample each task `n` times, or in an evaluation as `Task.eval_samples` says.

        Samples that exist already are kept.

        Raises:
            RoleError: more than `datapipe.max_failed_share` of the latest episodes failed.
        """
        done = self.samples.done()
        is_train = self.split == "train"
        every = [
            (number, task, member)
            for number, task in enumerate(tasks)
            for member in range(n if is_train else task.eval_samples(n))
        ]
        jobs = [job for job in every if (job[0], job[2]) not in done]
        self._all = len(every)
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
            self.progress(self._done, self._all)

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
