"""A worker, the datapipe and a trainer link in one process: the path of a sample."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from zlib import crc32

import zmq

from arealite.api.task import Task
from arealite.api.trainer_messages import Finish, Published, StepReport
from arealite.api.trial import ClusterConfig
from arealite.base.errors import EpisodeError
from arealite.impl.rollout import worker as module
from arealite.impl.rollout.worker import RolloutWorker
from arealite.system.datapipe.datapipe import Datapipe
from arealite.system.links.trainer_link import TrainerLink
from arealite.system.links.worker_link import WorkerLink
from tests.fakes.client import ScriptedClient, response
from tests.fakes.experiment import experiment, tokenizer
from tests.impl.rollout import worlds  # registers the environments
from tests.payloads import decode_segments
from tests.system.scenes import saved

STEPS = 4


async def test_worker_datapipe_and_trainer_complete_a_run(tmp_path: Path, monkeypatch) -> None:
    assert worlds is not None
    monkeypatch.setattr(module, "DRAIN_GRACE_S", 0.1)
    config = experiment("world", group_size=4, concurrency=32)
    ppo = dataclasses.replace(config.trainer.ppo, batch_size=12, max_staleness=2)
    config = dataclasses.replace(
        config,
        trainer=dataclasses.replace(config.trainer, ppo=ppo),
        cluster=ClusterConfig(run_root=str(tmp_path), name_root=str(tmp_path / "names")),
    )
    tasks = [
        Task(task_id=f"train-{row}", prompt="ok", ground_truth=None, extra_info={})
        for row in range(7)
    ]
    version, episodes = 0, set[str]()

    def script(request):
        name = f"{request.group_id}/{request.request_id.split('/')[1]}"
        is_new = name not in episodes
        episodes.add(name)
        if is_new and crc32(name.encode()) % 7 == 0:
            return EpisodeError("now and then")
        return response([10, 11, 12], version=max(version, request.min_version))

    with zmq.Context() as context:
        pipe = Datapipe(
            config=config,
            train=tasks,
            eval=[],
            registry=None,
            address="inproc://pipe",
            context=context,
        )
        link = WorkerLink(resolve=lambda: pipe.address, worker_id="w", capacity=32, context=context)
        worker = RolloutWorker(
            config, link=link, client=ScriptedClient(script), tokenizer=tokenizer()
        )

        def train() -> list[str]:
            nonlocal version
            rank = TrainerLink(resolve=lambda: pipe.address, rank=0, world_size=1, context=context)
            trained: list[str] = []
            rank.start(0)
            rank.report(Published(version=0))
            for step in range(STEPS):
                got = rank.next_batch(step)
                assert got is not None
                batch, payloads = got
                for header, payload in zip(batch.headers, payloads, strict=True):
                    (segment,) = decode_segments(payload)
                    assert len(segment.loss_mask) == header.num_tokens
                    assert header.oldest_version >= step - 2
                ids = [header.trajectory_id for header in batch.headers]
                trained += ids
                rank.report(StepReport(step=step, trained=ids, metrics={}))
                version = step + 1
                rank.report(Published(version=version))
            rank.report(saved(config, STEPS))
            rank.report(Finish(reason="done"))
            rank.close()
            return trained

        async with asyncio.timeout(240), asyncio.TaskGroup() as roles:
            running = roles.create_task(pipe.run())
            await pipe.ready.wait()
            working = roles.create_task(worker.run())
            trained = await asyncio.to_thread(train)
        assert running.done()
        assert working.done()
    assert len(trained) == len(set(trained)) == STEPS * 12
    assert worker.metrics()["episodes"] >= len(trained)
