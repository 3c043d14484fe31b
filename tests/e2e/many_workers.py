"""Roles of the test of many workers: a datapipe that scales, and workers that import no torch.

    python -m tests.e2e.many_workers site|worker ROOT [INDEX]

The environment is slow as long as ROOT/slow exists: an episode waits in it, and servers are idle.
Afterwards the servers are overloaded. The load of the servers is scripted; datapipe, ledger, links,
workers and collectors are real.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from arealite.api.agent import Agent
from arealite.api.collector_config import AutoscaleConfig
from arealite.api.env import Env, envs
from arealite.api.experiment_config import DatapipeConfig, ExperimentConfig
from arealite.api.launcher import LauncherConfig
from arealite.api.task import Task
from arealite.api.trial import ClusterConfig
from arealite.impl.launcher.processes import die_with_parent
from arealite.impl.rollout.worker import RolloutWorker
from arealite.system.links.worker_link import WorkerLink
from arealite.system.names.name_registry import NameRegistry
from tests.fakes.client import ScriptedClient, response
from tests.fakes.experiment import experiment

WORKERS, EACH = 32, 3
"""Most workers, and episodes of each."""


@envs.register("slow or fast")
class SlowOrFast(Env):
    """An environment that keeps an episode while a file exists."""

    async def run(self, task: Task, **agents: Agent) -> None:
        await agents["agent"].act("hello")
        slow = str(task.extra_info["slow"])
        while os.path.exists(slow):  # noqa: ASYNC110, ASYNC240  (a file has no event)
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.1)
        agents["agent"].reward(1.0)


class Letters:
    """A tokenizer without a package: a token for each character."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))


def configured(root: Path) -> ExperimentConfig:
    """Return the config of all roles; its names are those of the ScriptedLauncher."""
    autoscale = AutoscaleConfig(enabled=True, min_concurrency=1, period_s=0.2)
    config = experiment("slow or fast", group_size=1, concurrency=EACH, autoscale=autoscale)
    ppo = replace(config.trainer.ppo, batch_size=4, max_staleness=9000, total_steps=9000)
    return replace(
        config,
        experiment_name="e",
        trial_name="t",
        cluster=ClusterConfig(
            name_root=str(root / "names"), run_root=str(root), heartbeat_s=0.2, ttl_s=600.0
        ),
        datapipe=DatapipeConfig(lease_ttl_s=600.0),
        trainer=replace(config.trainer, ppo=ppo),
        launcher=LauncherConfig(rollout_workers=1, max_workers=WORKERS),
    )


def train_one_step(rank: Any) -> None:
    """Take a batch and report it as trained, so that the launcher's audit passes."""
    from arealite.api.trainer_messages import StepReport

    batch, _ = rank.next_batch(0)
    rank.report(
        StepReport(step=0, trained=[header.trajectory_id for header in batch.headers], metrics={})
    )


async def site(root: Path) -> None:
    """Run the datapipe: scale to WORKERS workers, then to one; write what was reached."""
    from arealite.api.trainer_messages import Finish, Published
    from arealite.ext.scaling import scaling
    from arealite.system.datapipe.datapipe import Datapipe
    from arealite.system.links.trainer_link import TrainerLink
    from tests.system.scenes import in_thread
    from tests.waiting import eventually

    scaling.CONFIRM_PERIODS = 2
    config, slow = configured(root), root / "slow"
    slow.touch()
    tasks = [
        Task(task_id=f"train-{row}", prompt="?", ground_truth=None, extra_info={"slow": str(slow)})
        for row in range(64)
    ]
    names = NameRegistry.of(config)
    pipe = Datapipe(config=config, train=tasks, eval=[], registry=names)

    def load() -> dict[str, object]:
        idle = {"running": 1, "waiting": 0, "capacity": 64}
        overloaded = {"running": 2, "waiting": 20, "capacity": 2}
        return {"address": "scripted", "load": idle if slow.exists() else overloaded}

    def trainer() -> TrainerLink:
        rank = TrainerLink(resolve=lambda: pipe.address, rank=0, world_size=1, secret=names.secret)
        rank.start(0)
        rank.report(Published(version=0))
        return rank

    def live() -> list[int]:
        """Return the running episodes of each connected worker."""
        return [w.in_flight for w in pipe.machine.workers.by_id.values() if w.route is not None]

    reached: dict[str, Any] = {}
    async with (
        names.registered("llm_server", "scripted", load),
        asyncio.TaskGroup() as roles,
    ):
        running = roles.create_task(pipe.run())
        await pipe.ready.wait()
        rank = await in_thread(trainer)
        full = lambda: len(live()) == WORKERS and all(each == EACH for each in live())  # noqa: E731
        await eventually(full, "all workers full", seconds=400.0)
        reached["full"] = live()
        slow.unlink()
        await eventually(lambda: len(live()) == 1, "one worker", seconds=400.0)
        workers = pipe.machine.workers.by_id.items()
        reached["left"] = [name for name, worker in workers if worker.route is not None]
        await in_thread(lambda: train_one_step(rank))
        (root / "reached").write_text(json.dumps(reached))  # the trainer's processes exit
        await in_thread(lambda: (rank.report(Finish(reason="done")), rank.close()))
        await running


async def work(root: Path, index: int) -> None:
    """Run one rollout worker."""
    config = configured(root)
    names = NameRegistry.of(config)
    link = WorkerLink(
        resolve=lambda: names.address("datapipe"),
        worker_id=f"rollout-{index}@host",
        capacity=EACH,
        secret=names.secret,
    )
    tokenizer: Any = Letters()
    client = ScriptedClient(lambda request: response(request.input_ids[-3:], version=0))
    await RolloutWorker(config, link=link, client=client, tokenizer=tokenizer).run()
    assert not {"torch", "transformers"} & {*sys.modules}


if __name__ == "__main__":
    die_with_parent()
    role, folder, *number = sys.argv[1:]
    asyncio.run(site(Path(folder)) if role == "site" else work(Path(folder), int(number[0])))
