"""A live datapipe for tests: its workers are in the same event loop, its trainer in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import patch

import pytest
import zmq

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.trainer_messages import Finish, Published, StepReport
from arealite.base.errors import InvariantError
from arealite.system.datapipe import machine
from arealite.system.datapipe.datapipe import Datapipe
from arealite.system.links.trainer_link import TrainerLink
from tests.system.scenes import FakeWorker, in_thread, payload, saved, tasks

Body = Callable[[TrainerLink], Any]
"""A blocking trainer."""


class Live:
    """A datapipe, the link of its trainer, and its workers. The fixture `start_pipe` makes it."""

    def __init__(
        self,
        config: ExperimentConfig,
        *,
        rows: int = 5,
        eval_rows: int = 0,
        endpoint: str = "tcp://127.0.0.1:0",
        context: zmq.Context[Any] | None = None,
    ) -> None:
        self.config = config
        self.rows = rows
        self.eval_rows = eval_rows
        self.endpoint = endpoint
        self.context = context
        self.address = ""
        """Address of the last datapipe that was ready; workers and trainer resolve it."""
        self.link = self.connect()
        self._working: dict[FakeWorker, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Start the datapipe; after `kill`, start it again on the same ledger."""
        self.pipe = Datapipe(
            config=self.config,
            train=tasks(self.rows),
            eval=tasks(self.eval_rows, "eval"),
            registry=None,
            address=self.endpoint,
            context=self.context,
        )
        self.running = asyncio.create_task(self.pipe.run())
        ready = asyncio.create_task(self.pipe.ready.wait())
        await asyncio.wait([self.running, ready], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self.running.done():
            await self.running
        self.address = self.pipe.address

    async def kill(self) -> None:
        """Cancel the datapipe; its ledger has only the commits, as after a kill."""
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)

    def work(self, **options: Any) -> FakeWorker:
        """Start a worker; the options are those of FakeWorker."""
        worker = FakeWorker(lambda: self.address, context=self.context, **options)
        self._working[worker] = asyncio.create_task(worker.run())
        return worker

    async def kill_worker(self, worker: FakeWorker) -> None:
        task = self._working.pop(worker)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def connect(self, *, rank: int = 0, world_size: int = 1) -> TrainerLink:
        """Return the link of a rank."""
        return TrainerLink(
            resolve=lambda: self.address, rank=rank, world_size=world_size, context=self.context
        )

    async def trainer(self, body: Body) -> Any:
        """Run the trainer in a thread; return its result."""
        return await in_thread(lambda: body(self.link))

    async def begin(self) -> None:
        """Start a trainer that has published version 0."""
        await self.trainer(begin)

    async def train(self, steps: int, **options: Any) -> list[list[str]]:
        """Run `train` in a thread."""
        return await self.trainer(lambda link: train(link, self.config, steps=steps, **options))

    async def end(self) -> None:
        """Wait until the datapipe and the workers have ended normally."""
        async with asyncio.timeout(60):
            await self.running
            await asyncio.gather(*self._working.values())

    async def refused(self, body: Body, *, match: str | None = None) -> str:
        """Return the error with which the datapipe stopped; the trainer was refused with it."""
        with (
            patch.object(machine, "REFUSAL_S", 600.0),
            pytest.raises(InvariantError, match=match) as of_trainer,
        ):
            await self.trainer(body)
        with patch.object(machine, "REFUSAL_S", 0.0), pytest.raises(InvariantError) as of_pipe:
            await self.running
        assert str(of_pipe.value) in str(of_trainer.value)
        return str(of_pipe.value)

    async def close(self) -> None:
        """Cancel all that still runs."""
        for worker in list(self._working):
            await self.kill_worker(worker)
        await self.kill()
        self.link.close()


StartPipe = Callable[..., Awaitable[Live]]
"""The fixture `start_pipe`."""


def begin(link: TrainerLink) -> None:
    """Start a trainer at step 0, and publish its version."""
    link.start(0)
    link.report(Published(version=0))


def finish(link: TrainerLink, config: ExperimentConfig, step: int) -> None:
    """Report the last checkpoint and the end of the run."""
    link.report(saved(config, step))
    link.report(Finish(reason="test over"))


def next_ids(link: TrainerLink, step: int) -> list[str]:
    """Wait for a batch; return its trajectory ids."""
    answer = link.next_batch(step)
    assert answer is not None
    batch, payloads = answer
    assert [payload(batch.headers[i]) for i in batch.mine] == payloads
    return [h.trajectory_id for h in batch.headers]


def train(
    link: TrainerLink,
    config: ExperimentConfig,
    *,
    steps: int,
    first: int = 0,
    finishes: bool = True,
    on_step: Callable[[int], object] = lambda step: None,
) -> list[list[str]]:
    """Train with one rank; return the trajectory ids of each step."""
    seen: list[list[str]] = []
    assert link.start(first).step == first
    link.report(Published(version=first))
    max_staleness = config.trainer.ppo.max_staleness
    for step in range(first, first + steps):
        answer = link.next_batch(step)
        assert answer is not None
        batch, payloads = answer
        assert [payload(batch.headers[i]) for i in batch.mine] == payloads
        assert all(step - h.oldest_version <= max_staleness for h in batch.headers)
        seen.append([h.trajectory_id for h in batch.headers])
        on_step(step)
        link.report(StepReport(step=step, trained=seen[-1], metrics={}))
        link.report(Published(version=step + 1))
    if finishes:
        finish(link, config, first + steps)
    link.close()
    return seen
