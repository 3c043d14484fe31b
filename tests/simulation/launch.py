"""Simulates one launch by the rules of the local launcher: dead roles are restarted.

If one rank dies, all ranks are restarted. A broken invariant, a death during the stop of the run,
or the death of the launcher ends the launch; then the simulation launches the run again.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from arealite.base.errors import InvariantError, RoleError
from tests.simulation.loop import Killed
from tests.simulation.trainer import TrainerGroup

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

EARLY_S = 5.0
"""Grace period after an unexpected clean exit."""


class Launch:
    """The roles of one launch and their exits."""

    def __init__(self, sim: Simulation) -> None:
        self.sim, self.rng = sim, sim.rng
        self.killed = False
        """The launcher was killed, and with it all its children."""
        self.stopping = False
        self.trainer_ended = self.datapipe_ended = False
        self.disk_is_full = False
        self.over = asyncio.Event()
        """Set once roles may exit."""
        self.trainer: TrainerGroup | None = None
        self._finished = False

    async def run(self) -> bool:
        """Start all roles and restart those that die; return True once all steps are trained."""
        sim, scenario = self.sim, self.sim.scenario
        ranks = self.rng.choice((scenario.ranks, scenario.ranks, 1, 2, 3))
        workers = self.rng.choice((scenario.workers, scenario.workers, 1, 3))
        sim.note("launch", f"{workers} workers, {ranks} ranks")
        async with asyncio.TaskGroup() as tasks:
            others = [tasks.create_task(self._keep_datapipe())]
            others += [tasks.create_task(self._keep_worker(i)) for i in range(workers)]
            await tasks.create_task(self._keep_trainer(ranks))
            self.over.set()
            await self._end(others)
            for task in others:
                task.cancel()
        return self._finished

    def stop(self) -> None:
        """Send SIGTERM to every rank, as Ctrl-C does."""
        if self.trainer is not None and not self.stopping:
            self.stopping = True
            self.over.set()
            for rank in range(self.trainer.ranks):
                delay = self.rng.uniform(0.0, 0.05)
                self.sim.loop.call_later(delay, self.trainer.ask_to_stop, rank)

    def kill(self) -> None:
        """Kill the launcher; the kernel kills its children."""
        self.killed = True
        for process in list(self.sim.roles.values()):
            self.sim.kill(process, "its launcher died")

    async def _end(self, others: list[asyncio.Task[None]]) -> None:
        """Wait for the exit of the datapipe, then end the remaining roles."""
        sim = self.sim
        late: set[asyncio.Task[None]] = set()
        if not self.killed:
            _, late = await asyncio.wait(others, timeout=60.0)
        if late and not self.killed:
            # A role that was restarted after the last message has not received it.
            left = "datapipe" not in sim.roles or sim.pipe.machine.requests.finish is None
            sim.expect(left, f"the datapipe does not end after the trainer: {sim.describe_roles()}")
            for name in list(sim.roles):
                sim.terminate(name)
            await asyncio.wait(late, timeout=6.0)
        for process in list(sim.roles.values()):
            sim.kill(process, "end of the launch")

    async def _may_exit(self) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.over.wait(), EARLY_S)
        return self.over.is_set()

    async def _pause(self) -> bool:
        """Wait for the restart delay; return False if the launcher was killed."""
        await asyncio.sleep(self.rng.uniform(0.1, 2.5))
        return not self.killed

    async def _keep_datapipe(self) -> None:
        again = True
        while again:
            error = await self.sim.live("datapipe", self.sim.datapipe())
            if self.killed or self.trainer_ended:
                return
            if error is None and await self._may_exit():
                self.datapipe_ended = True
                return
            if isinstance(error, InvariantError) and self.disk_is_full:
                await asyncio.sleep(1.0)  # the trainer receives the reason
                self.kill()
                return
            expected = error is None or isinstance(error, Killed)
            self.sim.expect(expected, f"the datapipe stopped: {error!r}")
            again = await self._pause()

    async def _keep_worker(self, index: int) -> None:
        name, again = f"rollout-{index}", True
        while again:
            error = await self.sim.live(name, self.sim.worker(name))
            if self.killed or self.trainer_ended or self.datapipe_ended:
                return
            if error is None and await self._may_exit():
                return
            expected = error is None or isinstance(error, (Killed, RoleError))
            self.sim.expect(expected, f"{name} stopped: {error!r}")
            again = await self._pause()

    async def _keep_trainer(self, ranks: int) -> None:
        sim, again = self.sim, True
        while again:
            group = self.trainer = TrainerGroup(sim, ranks)
            error = await self._run_ranks(group)
            again = error is not None and not self._is_last(error)
            if again:
                expected = isinstance(error, (Killed, RoleError))
                sim.expect(expected, f"a trainer rank stopped: {error!r}")
                await asyncio.sleep(self.rng.uniform(0.0, 0.5))
            for process in group.processes:
                sim.kill(process, "its group")
            again = again and await self._pause() and not self.stopping
            ranks = self.rng.choice((ranks, ranks, 1, 2, 3))
        done = sim.disk.newest()[0] >= sim.scenario.total_steps
        if not self.killed and (error is None or self.datapipe_ended):
            sim.expect(done or self.stopping, "the run ended before its last step")
            self._finished = done
        self.trainer_ended = True
        if self.disk_is_full or (error is not None and self.stopping):
            self.kill()

    def _is_last(self, error: BaseException) -> bool:
        """Return whether the trainer is not restarted: it has finished, or the launch ends."""
        by_rule = isinstance(error, InvariantError) and self.disk_is_full
        return self.killed or by_rule or self.stopping or self.datapipe_ended

    async def _run_ranks(self, group: TrainerGroup) -> BaseException | None:
        """Run all ranks until one dies; return its error, or None if all exit normally."""
        self.sim.note("trainer", f"{group.ranks} ranks from step {group.step}")
        waiting = {
            asyncio.ensure_future(self.sim.live(process.name, group.main(rank), process))
            for rank, process in enumerate(group.processes)
        }
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if dead := [task.result() for task in done if task.result() is not None]:
                return dead[0]
        return None
