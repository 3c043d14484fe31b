"""Concurrency with a slow and then a fast environment; only the server is a fake."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import zmq

from arealite.api.agent import Agent
from arealite.api.collector_config import AutoscaleConfig
from arealite.api.env import Env, envs
from arealite.api.experiment_config import DatapipeConfig, ExperimentConfig, ModelConfig
from arealite.api.llm import LLMClientConfig, ServersClientConfig
from arealite.api.task import Task
from arealite.api.trainer_messages import Finish, Published
from arealite.api.trial import ClusterConfig
from arealite.impl.client.servers_client import ServersClient
from arealite.impl.rollout import worker as module
from arealite.impl.rollout.worker import RolloutWorker
from arealite.system.datapipe.datapipe import Datapipe
from arealite.system.links.trainer_link import TrainerLink
from arealite.system.links.worker_link import WorkerLink
from arealite.system.names.name_registry import NameRegistry
from tests.fakes.experiment import experiment, tokenizer
from tests.fakes.sglang import FakeSGLang, Job
from tests.models import tiny_model
from tests.system.scenes import in_thread
from tests.waiting import eventually

CAPACITY, MOST = 8, 24
SLOW, FAST = 6, 1
"""Duration of a turn, in multiples of the duration of its generation."""


@envs.register("delayed")
class DelayedEnv(Env):
    """An environment that waits after each answer until its event is set."""

    pending: dict[str, asyncio.Event]
    cancelled = 0

    async def run(self, task: Task, **agents: Agent) -> None:
        enough, name = asyncio.Event(), agents["agent"].seat.episode_id
        try:
            await agents["agent"].act("hello")
            DelayedEnv.pending[name] = enough
            await enough.wait()
        except asyncio.CancelledError:
            DelayedEnv.cancelled += 1
            raise
        agents["agent"].reward(1.0)


class SteppedServer(FakeSGLang):
    """A server that answers on request of the test."""

    def __init__(self) -> None:
        super().__init__(version="0", capacity=CAPACITY)
        self.answered: set[str] = set()

    def _is_held(self, job: Job) -> bool:
        return job.rid not in self.answered

    @property
    def blocked(self) -> list[str]:
        return [rid for rid, job in self._jobs.items() if self._is_held(job)]

    async def answer(self, count: int) -> None:
        self.answered.update(self.blocked[:count])
        await self._notify()


class EpisodePacer:
    """Replaces time: advances one episode whenever all episodes are blocked, so that one in
    `turn` episodes generates, independent of the speed of the machine."""

    def __init__(self, server: SteppedServer, in_flight: Callable[[], int]) -> None:
        self.server, self.in_flight, self.turn = server, in_flight, SLOW
        DelayedEnv.pending = {}

    async def keep(self) -> None:
        pending = DelayedEnv.pending
        while True:
            await eventually(self.is_settled, "all episodes at their places", seconds=120.0)
            generating = len(self.server.blocked)
            surplus = generating - round((generating + len(pending)) / self.turn)
            if surplus <= 0 and pending:
                pending.pop(next(iter(pending))).set()
            else:
                await self.server.answer(max(surplus, 1))

    def is_settled(self) -> bool:
        """Return whether all episodes are blocked; a lease sent twice may run twice."""
        return 0 < self.in_flight() <= len(self.server.blocked) + len(DelayedEnv.pending)


def configured(root: Path) -> ExperimentConfig:
    own = AutoscaleConfig(enabled=True, min_concurrency=2, period_s=0.15)
    client = LLMClientConfig(servers=ServersClientConfig(connect_timeout_s=60.0))
    config = experiment("delayed", group_size=2, concurrency=MOST, autoscale=own, client=client)
    ppo = replace(config.trainer.ppo, batch_size=4, max_staleness=9000, total_steps=9000)
    return replace(
        config,
        model=ModelConfig(path=str(tiny_model(root / "model", vocab=320))),
        cluster=ClusterConfig(
            run_root=str(root), name_root=str(root / "names"), heartbeat_s=0.05, ttl_s=600.0
        ),
        datapipe=DatapipeConfig(commit_interval_s=0.001, lease_ttl_s=600.0),
        trainer=replace(config.trainer, ppo=ppo),
        launcher=replace(config.launcher, rollout_workers=2),
    )


async def test_concurrency_follows_a_slow_and_then_a_fast_environment(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(module, "DRAIN_GRACE_S", 0.1)
    config = configured(tmp_path)
    names = NameRegistry.of(config)
    tasks = [
        Task(task_id=f"train-{row}", prompt="?", ground_truth=None, extra_info={})
        for row in range(7)
    ]
    server = SteppedServer()
    with zmq.Context() as context:
        pipe = Datapipe(
            config=config,
            train=tasks,
            eval=[],
            registry=names,
            address="inproc://pipe",
            context=context,
        )

        def begun() -> TrainerLink:
            rank = TrainerLink(resolve=lambda: pipe.address, rank=0, world_size=1, context=context)
            rank.start(0)
            rank.report(Published(version=0))
            return rank

        async def work(number: int) -> RolloutWorker:
            link = WorkerLink(
                resolve=lambda: pipe.address,
                worker_id=f"rollout-{number}@host",
                capacity=MOST,
                context=context,
            )
            client = ServersClient(config, config.trainer.ppo.collector.client)
            worker = RolloutWorker(config, link=link, client=client, tokenizer=tokenizer())
            await worker.run()
            return worker

        named = names.registered("llm_server", "fake", server.entry)
        async with server, asyncio.timeout(240), named, asyncio.TaskGroup() as roles:
            roles.create_task(pipe.run())
            await pipe.ready.wait()
            working = [roles.create_task(work(number)) for number in range(2)]
            rank = await in_thread(begun)
            told = pipe.machine.workers.metrics
            target = lambda: told()["rollout/target_concurrency"]  # noqa: E731
            in_flight = lambda: sum(w.in_flight for w in pipe.machine.workers.by_id.values())  # noqa: E731
            pace = EpisodePacer(server, in_flight)
            pacing = roles.create_task(pace.keep())

            async def reached(what: str, condition: Callable[[], bool]) -> None:
                await eventually(condition, what, seconds=120.0)

            # 43 running episodes have 43 / 6 = 7.2 running requests.
            await reached("many", lambda: target() >= 30 and in_flight() >= 30)
            assert in_flight() <= 2 * MOST
            pace.turn = FAST
            await reached("few", lambda: target() <= 13 and in_flight() <= 14)
            pace.turn = SLOW
            await reached("many again", lambda: target() >= 30 and in_flight() >= 30)
            assert DelayedEnv.cancelled == 0, "fewer are reached as episodes end"
            assert told()["rollout/workers"] == 2
            pacing.cancel()
            await in_thread(lambda: (rank.report(Finish(reason="done")), rank.close()))
            await asyncio.gather(*working)
        failed = [name for w in working for name in w.result().metrics() if "failed" in name]
        assert not failed
