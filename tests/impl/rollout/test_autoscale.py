"""A slow environment and then a fast one: the real datapipe, workers and client, a server faked."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import zmq

from arealite.api.agent import Agent
from arealite.api.collector import AutoscaleConfig
from arealite.api.config import ClusterConfig, ExperimentConfig, ModelConfig
from arealite.api.env import Env, envs
from arealite.api.task import Task
from arealite.impl.client.sglang import SGLangClient
from arealite.impl.rollout import worker as module
from arealite.impl.rollout.worker import RolloutWorker
from arealite.system.datapipe.datapipe import Datapipe
from arealite.system.links.trainer_link import TrainerLink
from arealite.system.links.worker_link import WorkerLink
from arealite.system.names.registry import NameRegistry
from tests.fakes.experiment import experiment, tokenizer
from tests.fakes.sglang import FakeSGLang
from tests.models import tiny_model
from tests.system.scenes import in_thread
from tests.waiting import eventually

CAPACITY, MOST = 8, 24
TOKEN_S, SLOW_S = 0.0125, 0.5


@envs.register("thoughtful")
class Thoughtful(Env):
    """Takes its time after each answer."""

    seconds = SLOW_S
    cancelled = 0

    async def run(self, task: Task, **agents: Agent) -> None:
        try:
            await agents["agent"].act("hello")
            await asyncio.sleep(Thoughtful.seconds)
        except asyncio.CancelledError:
            Thoughtful.cancelled += 1
            raise
        agents["agent"].reward(1.0)


def configured(root: Path) -> ExperimentConfig:
    own = AutoscaleConfig(enabled=True, min_concurrency=2, period_s=0.15)
    config = experiment("thoughtful", group_size=2, concurrency=MOST, autoscale=own)
    ppo = replace(config.trainer.ppo, batch_size=4, max_staleness=9000, total_steps=9000)
    return replace(
        config,
        model=ModelConfig(path=str(tiny_model(root / "model"))),
        cluster=ClusterConfig(
            run_root=str(root), name_root=str(root / "names"), heartbeat_s=0.05, ttl_s=30.0
        ),
        trainer=replace(config.trainer, ppo=ppo),
        launcher=replace(config.launcher, rollout_workers=2),
    )


async def test_concurrency_follows_a_slow_and_then_a_fast_environment(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(module, "DRAIN_GRACE_S", 0.1)
    config = configured(tmp_path)
    names = NameRegistry.of(config)
    tasks = [Task(f"train-{row}", "?", None, {}) for row in range(7)]
    server = FakeSGLang(version="0", token_s=TOKEN_S, capacity=CAPACITY)
    with zmq.Context() as context:
        pipe = Datapipe(
            config, train=tasks, eval=[], registry=names, address="inproc://pipe", context=context
        )

        def begun() -> TrainerLink:
            rank = TrainerLink(lambda: pipe.address, rank=0, world_size=1, context=context)
            rank.start(0)
            rank.published(0)
            return rank

        async def work(number: int) -> RolloutWorker:
            link = WorkerLink(
                lambda: pipe.address,
                worker_id=f"rollout-{number}@host",
                capacity=MOST,
                context=context,
            )
            client = SGLangClient(config, config.trainer.ppo.collector.client)
            worker = RolloutWorker(config, link=link, client=client, tokenizer=tokenizer())
            await worker.run()
            return worker

        named = names.registered("llm_server", "fake", server.entry, heartbeat_s=0.05)
        async with server, asyncio.timeout(120), named, asyncio.TaskGroup() as roles:
            roles.create_task(pipe.run())
            await pipe.ready.wait()
            working = [roles.create_task(work(number)) for number in range(2)]
            rank = await in_thread(begun)
            told = pipe.workers.metrics
            target = lambda: told()["rollout/target_concurrency"]  # noqa: E731
            in_flight = lambda: sum(w.in_flight for w in pipe.workers.by_id.values())  # noqa: E731
            # Of 8 tokens each, 7.2 requests run where 7.2 · 0.6 s / 0.1 s = 43 episodes do.
            await eventually(lambda: target() >= 30 and in_flight() >= 30, "many")
            assert in_flight() <= 2 * MOST
            Thoughtful.seconds = 0.0
            await eventually(lambda: target() <= 13 and in_flight() <= 14, "few")
            Thoughtful.seconds = SLOW_S
            await eventually(lambda: target() >= 30 and in_flight() >= 30, "many again")
            assert Thoughtful.cancelled == 0, "fewer are reached as episodes end"
            assert told()["rollout/workers"] == 2
            await in_thread(lambda: (rank.finish("done"), rank.close()))
            await asyncio.gather(*working)
        failed = [name for w in working for name in w.result().metrics() if "failed" in name]
        assert not failed
