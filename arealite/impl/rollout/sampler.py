"""Samples tasks for `eval` and `collect`, through the collector that training uses.

A finished sample is durable before the next one starts in its place.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import Any

from msgspec.structs import replace

from arealite.api.agent import Agent
from arealite.api.config import ExperimentConfig
from arealite.api.episode import Action
from arealite.api.observation import messages
from arealite.api.rollout_messages import Failure, Lease
from arealite.api.task import Task
from arealite.api.trajectory import decode_segments, encode_segments
from arealite.base.errors import RoleError
from arealite.impl.rollout.collector import Agents, Collector, Part, Played
from arealite.system.data.samples import Samples
from arealite.system.datapipe.group_store import FAILURE_WINDOW
from arealite.system.health.waits import is_cancelled
from arealite.system.ledger.group import back_off_s, too_many_failures
from arealite.system.ledger.payloads import payload_sum

Job = tuple[int, Task, int]
"""(number of the task, the task, number of the sample)."""


class ObservingCollector(Collector):
    """A collector that adds `next_state` to segments."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._seen = dict[tuple[str, int], dict[str, dict[int, str]]]()
        """The observations of each episode and seat, by the number of tokens sampled before."""

    async def run(self, lease: Lease, member: int, turns: Sequence[bytes] = ()) -> Played:
        """Run one episode; see Collector.run."""
        episode, payloads = await super().run(lease, member, turns)
        seen = self._seen.pop((lease.group_id, member), {})
        for number, header in enumerate(episode.headers):
            segments, sampled = decode_segments(payloads[number]), 0
            for i, segment in enumerate(segments):
                sampled += segment.loss_mask.count(1)
                segments[i] = replace(segment, next_state=seen[header.seat].get(sampled, ""))
            payloads[number] = encode_segments(segments)
            episode.headers[number] = replace(header, payload_sum=payload_sum(payloads[number]))
        return episode, payloads

    def _make_agents(self, part: Part, lease: Lease, member: int, turns: Sequence[bytes]) -> Agents:
        agents = super()._make_agents(part, lease, member, turns)
        seats = self._seen[lease.group_id, member] = {name: dict[int, str]() for name in agents}
        for name, agent in agents.items():
            watch(agent, seats[name])
        return agents


def watch(agent: Agent, seen: dict[int, str]) -> None:
    """Add the text of each observation of an agent to `seen`."""
    act = agent.act

    async def watched(observation: object) -> Action:
        sampled = sum(len(turn.response.output_ids) for turn in agent.record.turns)
        with suppress(TypeError):  # an agent may accept other observations than messages
            texts = [str(each.get("content") or "") for each in messages(observation)]
            seen.setdefault(sampled, "\n".join(texts))
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
        self._ppo, self._share = self.config.trainer.ppo, self.config.datapipe.max_failed_share
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
        done, is_train = self.samples.done(), self.split == "train"
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
