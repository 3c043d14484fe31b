"""kill -9 of a real datapipe process at random times: the trainer gets each sample once."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import signal
import sys
from pathlib import Path

import pytest

from arealite.api.experiment_config import ExperimentConfig, name_dir, run_paths
from arealite.ext.audit.audit import audit
from arealite.system.links.trainer_link import TrainerLink
from arealite.system.names.name_registry import NameRegistry
from tests.system.live import train
from tests.system.scenes import FakeWorker, episode, experiment, failed, in_thread
from tests.waiting import until

SERVE = """
import asyncio, os, pickle, sys
from pathlib import Path
from arealite.api.experiment_config import name_dir
from arealite.system.ledger import group as open_group
from arealite.system.datapipe.datapipe import Datapipe
from arealite.system.names.name_registry import NameRegistry
from tests.system.scenes import tasks

def serve():
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    open_group.BACK_OFF_S = 0.0
    config = pickle.loads(Path(sys.argv[1]).read_bytes())
    names = NameRegistry(root=name_dir(config))
    asyncio.run(Datapipe(config=config, train=tasks(7), eval=[], registry=names).run())
    assert not {"torch", "transformers", "aiohttp"} & sys.modules.keys()

for _ in sys.stdin:
    pid = os.fork()
    if pid == 0:
        try:
            serve()
            os._exit(0)
        finally:
            os._exit(1)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
"""Each line of its input starts a datapipe; it writes the process id, and later the exit code. The
datapipes are forks, because the imports take a second."""


class DatapipeProcess:
    """A datapipe in a process of its own, which can be killed and started again."""

    @classmethod
    async def start(cls, config: ExperimentConfig, root: Path) -> DatapipeProcess:
        (root / "config").write_bytes(pickle.dumps(config))
        datapipe = cls()
        datapipe.parent = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SERVE, str(root / "config"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        await datapipe.fork()
        return datapipe

    async def fork(self) -> None:
        assert self.parent.stdin
        self.parent.stdin.write(b"\n")
        self.pid = await self.read_number()

    async def read_number(self) -> int:
        assert self.parent.stdout
        return int(await self.parent.stdout.readline())

    async def exit_code(self) -> int:
        """Wait until the datapipe has exited."""
        return await self.read_number()

    async def kill_and_restart(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert await self.exit_code() == -signal.SIGKILL
        await self.fork()


@pytest.mark.processes
async def test_kill_9_loses_and_repeats_nothing(tmp_path: Path) -> None:
    config = experiment(tmp_path, num_groups=4, group_size=2, filter_zero_variance=True)
    names = NameRegistry(root=name_dir(config))

    def resolve() -> str | None:
        entries = names.list("datapipe")
        return str(entries[0].value["address"]) if entries else None

    rng = random.Random(3)

    def script(lease, member):
        if rng.random() < 0.1:
            return failed(lease, member)
        return episode(lease, member, reward=float(rng.random() < 0.7))

    steps = 90
    loop = asyncio.get_running_loop()
    reached: dict[int, asyncio.Event] = {step: asyncio.Event() for step in (10, 40, 70)}

    def on_step(step: int) -> None:
        if step in reached:
            loop.call_soon_threadsafe(reached[step].set)
        if step == steps - 1:  # a worker that has not reconnected at the end gets no Drain
            until(lambda: all(map(is_back, workers)), what="every worker to be back")

    def is_back(worker: FakeWorker) -> bool:
        link = worker.link
        return link._address == resolve() and link._received_at > link._connected_at

    datapipe = await DatapipeProcess.start(config, tmp_path)
    link = TrainerLink(resolve=resolve, rank=0, world_size=1, silence_s=60.0)
    workers = [FakeWorker(resolve, worker_id=f"w{n}", capacity=7, script=script) for n in range(2)]
    training = asyncio.create_task(
        in_thread(lambda: train(link, config, steps=steps, on_step=on_step))
    )
    working = [asyncio.create_task(worker.run()) for worker in workers]
    for event in reached.values():
        waiting = asyncio.create_task(event.wait())
        await asyncio.wait([training, waiting], return_when=asyncio.FIRST_COMPLETED)
        assert not training.done(), training
        await datapipe.kill_and_restart()
    seen = await training
    await asyncio.gather(*working)
    assert await datapipe.exit_code() == 0
    datapipe.parent.kill()
    await datapipe.parent.wait()

    report = audit(run_paths(config).ledger)
    assert report.ok, report.table()
    assert report.steps == steps == len(seen)
    assert report.groups.trained == 4 * steps
    assert report.max_staleness <= 2
    assert report.filtered_by_reason["zero_variance"] > 0
    assert report.trained_trajectories == sum(len(ids) for ids in seen)
    boots = {lease.lease_id.split(".")[1] for worker in workers for lease in worker.leases}
    assert len(boots) == 4, "the kills did not happen in mid-stream"
