"""Train with a real engine, publisher and datapipe, a scripted server and synthetic episodes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from arealite.api.collector_config import CollectorConfig
from arealite.api.experiment_config import ExperimentConfig, LoggerConfig, ModelConfig, run_paths
from arealite.api.publisher import PublisherConfig
from arealite.api.rollout_messages import Episode, Lease
from arealite.api.task import Task
from arealite.api.trainer import CheckpointConfig, PPOConfig, TrainerConfig
from arealite.api.trial import ClusterConfig
from arealite.ext.audit.audit import audit
from arealite.impl.trainer.ppo import AsyncPPOTrainer, PPOTrainer
from arealite.system.datapipe.datapipe import Datapipe
from arealite.system.links.worker_link import WorkerLink
from arealite.system.names.name_registry import NameRegistry
from tests.fakes.sglang import FakeSGLang
from tests.impl.trainer.trajectories import header, segment
from tests.models import tiny_model
from tests.payloads import encode_segments

TASKS = [
    Task(task_id=f"train-{row}", prompt=f"{row}", ground_truth=None, extra_info={})
    for row in range(16)
]


class Server(FakeSGLang):
    """A server that reads the weights of each update."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, dict[str, torch.Tensor]] = {}

    async def change(self, body: dict[str, Any]) -> bool:
        self.loaded[body["weight_version"]] = load_file(f"{body['model_path']}/model.safetensors")
        return await super().change(body)


class Others:
    """All roles except the trainer, in a thread with its own event loop."""

    def __init__(self, config: ExperimentConfig) -> None:
        self.config = config
        self.names = NameRegistry.of(config)
        self.failure: BaseException | None = None
        self.server: Server | None = None
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # noqa: BLE001  (raised again in the test)
            self.failure = error

    async def _main(self) -> None:
        async with (
            Server() as self.server,
            self.names.registered("llm_server", "s0", self.server.entry),
        ):
            pipe = Datapipe(config=self.config, train=TASKS, eval=[], registry=self.names)
            link = WorkerLink(
                resolve=self._resolve, worker_id="w0", capacity=16, secret=self.names.secret
            )
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(link.run())
                tasks.create_task(self._work(link))
                await pipe.run()
                link.drain()  # a link that connects late gets no stop message

    def _resolve(self) -> str | None:
        entries = self.names.list("datapipe")
        return str(entries[0].value["address"]) if entries else None

    async def _work(self, link: WorkerLink) -> None:
        while (lease := await link.next_lease()) is not None:
            for member in lease.members:
                link.submit(*episode(lease, member))


def episode(lease: Lease, member: int) -> tuple[Episode, list[bytes]]:
    """Create an episode whose reward and tokens depend only on its name."""
    name = f"{lease.group_id}/{member}/agent"
    draw = np.random.default_rng([member, *name.encode()])
    tokens = draw.integers(3, 60, size=int(draw.integers(4, 20))).tolist()
    reward, told = float(draw.integers(0, 2)), {"version": lease.version, "logprob": -4.0}
    parts = [segment(tokens, sampled=len(tokens) - 2, reward=reward, **told)]
    made = header(name, parts, reward=reward, task_id=lease.task.task_id)
    done = Episode(
        lease_id=lease.lease_id,
        group_id=lease.group_id,
        member=member,
        headers=[made],
        failure=None,
    )
    return done, [encode_segments(parts)]


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., ExperimentConfig]:
    model = tiny_model(tmp_path / "model")

    def make(**ppo: Any) -> ExperimentConfig:
        settings = {"total_steps": 3, "batch_size": 8, "updates": 2, "lr": 1e-3} | ppo
        collector = CollectorConfig(group_size=4)
        learning = PPOConfig(
            collector=collector,
            checkpoint=CheckpointConfig(every_steps=2),
            publisher=PublisherConfig(self_check=False),  # the scripted server has no model
            **settings,
        )
        return ExperimentConfig(
            model=ModelConfig(path=str(model)),
            cluster=ClusterConfig(
                name_root=str(tmp_path / "names"), run_root=str(tmp_path / "runs"), ttl_s=600.0
            ),
            logger=LoggerConfig(types=["tensorboard"]),
            trainer=TrainerConfig(ppo=learning),
        )

    return make


def run(trainer: type[PPOTrainer], config: ExperimentConfig) -> Server:
    """Run the trainer in this thread and everything else in another."""
    others = Others(config)
    run_paths(config).root.mkdir(parents=True, exist_ok=True)
    others.thread.start()
    try:
        trainer(config).train()
    finally:
        others.thread.join(120.0)
    assert others.failure is None, others.failure
    assert not others.thread.is_alive(), "datapipe and worker end with the trainer"
    assert others.server is not None
    return others.server


def lines(config: ExperimentConfig) -> list[dict[str, float]]:
    return [json.loads(line) for line in run_paths(config).metrics.read_text().splitlines()]


@pytest.mark.parametrize(("trainer", "eta"), [(PPOTrainer, 0), (AsyncPPOTrainer, 2)])
def test_run_trains_publishes_and_exports(
    config: Callable[..., ExperimentConfig], trainer: type[PPOTrainer], eta: int
) -> None:
    made = config(max_staleness=eta)
    server = run(trainer, made)
    assert sorted(server.loaded) == ["0", "1", "2", "3"]
    exported = load_file(run_paths(made).export / "model.safetensors")
    assert all(torch.equal(exported[name], value) for name, value in server.loaded["3"].items())
    assert not torch.equal(*(server.loaded[v]["model.norm.weight"] for v in ("0", "3")))
    assert [line["step"] for line in lines(made)] == [1, 2, 3]
    for line in lines(made):
        assert line["staleness/max"] <= eta
        assert line["update/count"] == 2
    report = audit(run_paths(made).ledger)
    assert report.ok, report.table()
    assert sorted(path.name for path in run_paths(made).checkpoints.iterdir()) == [
        "step-000002",
        "step-000003",
    ]


def test_resumed_run_continues_at_the_next_step(config: Callable[..., ExperimentConfig]) -> None:
    run(AsyncPPOTrainer, config(total_steps=2))
    made = config(total_steps=4)
    server = run(AsyncPPOTrainer, made)
    assert sorted(server.loaded) == ["2", "3", "4"]
    assert [line["step"] for line in lines(made)] == [1, 2, 3, 4]
    assert audit(run_paths(made).ledger).ok
