"""Small experiments for the datapipe's tests: tasks, headers, fake workers and trainers."""

from __future__ import annotations

import asyncio
import random
import threading
import zlib
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq

from arealite.api.experiment_config import DatapipeConfig, ExperimentConfig, run_paths
from arealite.api.payloads import Payload
from arealite.api.rollout_messages import Episode, Failure, Lease
from arealite.api.task import Task
from arealite.api.trainer_messages import Checkpointed
from arealite.api.trajectory import Segment, TrajectoryHeader
from arealite.system.links.worker_link import WorkerLink
from tests.payloads import encode_segments
from tests.waiting import settle


def tasks(count: int, split: str = "train") -> list[Task]:
    return [
        Task(
            task_id=f"{split}-{row}",
            prompt="1 + 1 =",
            ground_truth="2",
            extra_info={"data_source": f"s{row % 2}"},
        )
        for row in range(count)
    ]


def experiment(
    root: Path, *, num_groups: int = 2, group_size: int = 2, pipe: dict[str, Any] | None = None,
    samples: int = 1, **ppo: Any,
) -> ExperimentConfig:  # fmt: skip
    config = ExperimentConfig()
    collector = replace(config.trainer.ppo.collector, group_size=group_size)
    ppo_config = replace(
        config.trainer.ppo,
        batch_size=num_groups * group_size,
        collector=collector,
        eval=replace(config.trainer.ppo.eval, samples=samples),
        **{"max_staleness": 2, **ppo},
    )
    return replace(
        config,
        cluster=replace(config.cluster, run_root=str(root), name_root=str(root / "names")),
        trainer=replace(config.trainer, ppo=ppo_config),
        datapipe=DatapipeConfig(**{"commit_interval_s": 0.001, **(pipe or {})}),
    )


def header(
    group_id: str, member: int, *, version: int = 0, newest: int | None = None,
    reward: float | None = 1.0, tokens: int = 8, seat: str = "agent",
) -> TrajectoryHeader:  # fmt: skip
    return TrajectoryHeader(
        trajectory_id=f"{group_id}/{member}/{seat}",
        group_id=group_id,
        member=member,
        seat=seat,
        task_id="train-0",
        reward=reward,
        reward_parts={},
        segment_lengths=[tokens],
        trained_tokens=tokens // 2,
        oldest_version=version,
        newest_version=version if newest is None else newest,
        turns=1,
        truncated=False,
        interruptions=0,
        seconds=0.1,
        waits={"generation": 0.1},
    )


def episode(lease: Lease, member: int, **fields: Any) -> Episode:
    fields = {"version": lease.version, **fields}
    made = header(lease.group_id, member, **fields)
    return Episode(
        lease_id=lease.lease_id,
        group_id=lease.group_id,
        member=member,
        headers=[made],
        failure=None,
    )


def failed(lease: Lease, member: int, name: str = "episode_timeout") -> Episode:
    return Episode(
        lease_id=lease.lease_id,
        group_id=lease.group_id,
        member=member,
        headers=[],
        failure=Failure(failure_class=name, detail="by the test"),
    )


def payload(header: TrajectoryHeader) -> Payload:
    """Return a payload that matches its header.

    The prompt identifies the group, and the sampled tokens identify the trajectory.
    """
    shared = zlib.crc32(header.group_id.encode()) >> 1
    segments = list[Segment]()
    left, versions = header.trained_tokens, (header.oldest_version, header.newest_version)
    for length in header.segment_lengths:
        sampled = min(length, left)
        left -= sampled
        prompt = length - sampled
        seed = zlib.crc32(f"{header.trajectory_id}/{len(segments)}".encode()) >> 1
        ages = [-1] * prompt + [versions[n % 2] for n in range(sampled)]
        ids = [(shared if n < prompt else seed) ^ n for n in range(length)]
        logprobs = array("f", [0.0] * prompt + [-1.0] * sampled)
        rewards = array("f", bytes(4 * length))
        if not segments:
            rewards[-1] = header.reward or 0.0
        segment = Segment(
            tokens=array("i", ids).tobytes(),
            loss_mask=bytes(prompt) + b"\1" * sampled,
            logprobs=logprobs.tobytes(),
            versions=array("i", ages).tobytes(),
            rewards=rewards.tobytes(),
            temperature=1.0,
        )
        segments.append(segment)
    return encode_segments(segments)


def saved(config: ExperimentConfig, step: int) -> Checkpointed:
    """Return the message with which a trainer reports its checkpoint of a step."""
    path = run_paths(config).checkpoints / f"step-{step:06d}"
    return Checkpointed(step=step, path=str(path))


class FakeWorker:
    """Answers every lease; `script` may replace an episode."""

    def __init__(
        self,
        resolve: Callable[[], str | None],
        *,
        worker_id: str = "worker-0",
        capacity: int = 8,
        context: zmq.Context[Any] | None = None,
        script: Callable[[Lease, int], Episode | None] | None = None,
        seed: int = 0,
    ) -> None:
        self.link = WorkerLink(
            resolve=resolve, worker_id=worker_id, capacity=capacity, context=context
        )
        self.script = script or (lambda lease, member: episode(lease, member, reward=member % 2))
        self.leases: list[Lease] = []
        self.random = random.Random(seed)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.link.run())
            while (lease := await self.link.next_lease()) is not None:
                self.leases.append(lease)
                for member in self.random.sample(lease.members, len(lease.members)):
                    done = self.script(lease, member)
                    if done is not None:
                        frames = [payload(h) for h in done.headers]
                        self.link.submit(done, frames)
                    await asyncio.sleep(0)
            self.link.drain()


async def in_thread(function: Callable[[], Any]) -> Any:
    """Run a blocking trainer in a daemon thread; return its result."""
    result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()

    def body() -> None:
        try:
            value = function()
        except BaseException as error:  # noqa: BLE001  (handed to the test)
            loop.call_soon_threadsafe(settle, result, None, error)
        else:
            loop.call_soon_threadsafe(settle, result, value, None)

    threading.Thread(target=body, daemon=True).start()
    return await result
