"""Simulates the trainer: the loop of `impl/trainer`, with a list of trained ids as its model.

Every rank uses the package's TrainerLink. The list is stored per step and per checkpoint and is
rolled back with them, independently of the ledger.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from arealite.api.payloads import Payload
from arealite.api.trainer_messages import Batch, Finish, Published, StepReport
from arealite.api.trajectory import Segment, TrajectoryHeader
from tests.payloads import decode_segments
from tests.simulation.links import async_link
from tests.simulation.loop import Process
from tests.simulation.players import MARK, logprob
from tests.system.scenes import saved

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

Model = list[tuple[str, ...]]
"""Trajectory ids by step."""
KEEP = 2


@dataclass
class Disk:
    """The checkpoints, which survive every crash."""

    saved: dict[int, Model] = field(default_factory=dict[int, Model])

    def newest(self) -> tuple[int, Model]:
        """Return the step of the newest checkpoint and the model in it."""
        step = max(self.saved, default=0)
        return step, list(self.saved.get(step, []))

    def save(self, step: int, model: Model) -> None:
        """Store a checkpoint atomically."""
        self.saved[step] = list(model)

    def prune(self) -> None:
        """Remove all but the newest."""
        for step in sorted(self.saved)[:-KEEP]:
            del self.saved[step]


class Collectives:
    """A barrier of all ranks; a dead rank blocks the others, as in a process group."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._calls = [0] * ranks
        self._open: dict[int, tuple[str, dict[int, Any], asyncio.Future[None]]] = {}

    async def gather(self, name: str, rank: int, value: Any = None) -> list[Any]:
        """Return the values of all ranks once all have arrived."""
        number = self._calls[rank]
        self._calls[rank] += 1
        made = (name, {}, asyncio.get_running_loop().create_future())
        opened, values, done = self._open.setdefault(number, made)
        assert opened == name, f"rank {rank} is at {name}, others at {opened}"
        values[rank] = value
        if len(values) == self.ranks:
            del self._open[number]
            done.set_result(None)
        else:
            await asyncio.shield(done)
        return [values[r] for r in range(self.ranks)]


class TrainerGroup:
    """All ranks of one start of the trainer."""

    def __init__(self, sim: Simulation, ranks: int) -> None:
        self.sim = sim
        self.ranks = ranks
        self.world = Collectives(ranks)
        self.step, self.model = sim.disk.newest()
        self.stop = [False] * ranks
        self.processes = [Process(f"trainer-{rank}") for rank in range(ranks)]

    def ask_to_stop(self, rank: int) -> None:
        """Send SIGTERM to a rank."""
        self.stop[rank] = True

    def main(self, rank: int) -> Coroutine[Any, Any, None]:
        """Return the coroutine function of a rank's process."""
        return Rank(self, rank).train()


class Rank:
    """One rank of AsyncPPOTrainer; with η = 0 the datapipe makes it synchronous."""

    def __init__(self, group: TrainerGroup, rank: int) -> None:
        self.group, self.rank, self.sim = group, rank, group.sim
        self.world = group.world
        self.scenario = group.sim.scenario
        self.lead = rank == 0
        self.link, self.fetch_link, self.push_link = (self._connect() for _ in range(3))
        self.fetched: asyncio.Task[Any] | None = None
        self.pushed: asyncio.Task[None] | None = None
        self.saved: int | None = None
        self.evaluating: int | None = None
        self.asked: set[int] = set()

    def _connect(self) -> Any:
        return async_link()(
            resolve=self.sim.resolve, rank=self.rank, world_size=self.group.ranks, context=object()
        )

    async def _meet(self, name: str, value: Any = None) -> list[Any]:
        return await self.world.gather(name, self.rank, value)

    async def train(self) -> None:
        """Train until the last step or a stop request."""
        await asyncio.sleep(self.sim.rng.uniform(0.1, 1.0))  # imports, loading
        step = await self.begin()
        while (batch := await self.next_batch(step)) is not None:
            await self.update(batch)
            if self.lead:
                trained = [header.trajectory_id for header in batch.headers]
                report = StepReport(
                    step=step,
                    trained=trained,
                    metrics={},
                    ranks=self.group.ranks,
                    fingerprint=f"{step:016x}",
                )
                await self.link.report(report)
                self.sim.promise("step", step)
            step += 1
            await self.publish(step)
            await self.keep(step)
        await self.end(step)
        for link in (self.link, self.fetch_link, self.push_link):
            link.close()

    async def begin(self) -> int:
        step = self.group.step
        await self._meet("begin")
        if self.lead:
            self.sim.trainer_starts(step)
            await self.link.start(step)
        ticket = max(await self._meet("ticket", self.link.ticket))
        for link in (self.link, self.fetch_link, self.push_link):
            link.ticket = ticket
        self.saved = step if step in self.sim.disk.saved else None
        await self.publish(step)
        await self.settle()
        if self.has_evaluation and step == 0:
            self.evaluate(step)
            await self.collect(wait=True)
        elif self.is_evaluation_due(step):
            self.evaluate(step)
        return step

    async def next_batch(self, step: int) -> Batch | None:
        stopping = any(await self._meet("stopping", self.group.stop[self.rank]))
        if step >= self.scenario.total_steps or stopping:
            return None
        answer = await (self.fetched or self.ask(step))
        follows = answer is not None and step + 1 < self.scenario.total_steps
        self.fetched = self.ask(step + 1) if follows else None
        if not all(await self._meet("fetched", answer is not None)):
            return None
        batch, payloads = answer
        self.check(batch, payloads)
        views = await self._meet("batch", batch)
        self.sim.check_views(views)
        return batch

    def ask(self, step: int) -> asyncio.Task[Any]:
        def on_wait(_: Any) -> bool:
            return self.group.stop[self.rank]

        return asyncio.create_task(self.fetch_link.next_batch(step, on_wait=on_wait))

    async def update(self, batch: Batch) -> None:
        await asyncio.sleep(self.sim.rng.expovariate(1.0 / self.scenario.train_s))
        await self._meet("update")
        if self.lead:
            self.group.model.append(tuple(header.trajectory_id for header in batch.headers))
            self.sim.check_trained_once(batch)

    async def publish(self, version: int) -> None:
        await self.settle()
        await self._meet("stage")
        if self.lead:
            self.pushed = asyncio.create_task(self.push(version))

    async def push(self, version: int) -> None:
        """Update every live server to a version, then report it as published."""
        servers = self.sim.servers
        servers.newest = version
        for index in range(len(servers.versions)):
            await asyncio.sleep(self.sim.rng.uniform(0.005, 0.2))
            if index not in self.sim.dead_servers:
                servers.set(index, version)
        await self.push_link.report(Published(version=version))

    async def settle(self) -> None:
        if self.pushed is not None:
            await self.pushed
            self.pushed = None

    async def keep(self, step: int) -> None:
        every = self.scenario.checkpoint_every
        if every and step % every == 0:
            await self.checkpoint(step)
        await self.collect(wait=False)
        if self.is_evaluation_due(step) and self.evaluating is None:
            self.evaluate(step)

    async def checkpoint(self, step: int) -> None:
        await asyncio.sleep(self.sim.rng.uniform(0.0, 0.3))
        await self._meet("save")
        if self.lead:
            self.sim.disk.save(step, self.group.model)
            await asyncio.sleep(self.sim.rng.uniform(0.0, 0.1))
        await self._meet("saved")
        self.saved = step
        if self.lead:
            await self.link.report(saved(self.scenario.experiment(self.sim.root), step))
            self.sim.promise("checkpoint", step)
            self.sim.disk.prune()

    async def end(self, step: int) -> None:
        await self.settle()
        if self.saved != step:
            await self.checkpoint(step)
        finished = step >= self.scenario.total_steps
        if finished and self.has_evaluation and not self.group.stop[self.rank]:
            await self.collect(wait=True)
            self.evaluate(step)
            await self.collect(wait=True)
        if self.lead:
            await self.link.report(
                Finish(reason="all steps are trained" if finished else "asked to stop")
            )

    # ------------------------------------------------------------ evaluations

    @property
    def has_evaluation(self) -> bool:
        return self.lead and self.scenario.eval_rows > 0

    def is_evaluation_due(self, step: int) -> bool:
        every = self.scenario.eval_every
        last = self.scenario.total_steps
        return self.has_evaluation and every > 0 and step % every == 0 and step < last

    def evaluate(self, step: int) -> None:
        self.link.evaluate(step)
        self.evaluating = step
        self.asked.add(step)

    async def collect(self, *, wait: bool) -> None:
        if self.evaluating is None:
            return
        result = await self.link.eval_result(
            wait=wait, on_wait=lambda _: self.group.stop[self.rank]
        )
        if result is not None:
            self.sim.expect(result.eval_id in self.asked, "an evaluation that nobody asked for")
            count = result.metrics.get("eval/num_prompts")
            self.sim.expect(count == self.scenario.eval_rows, f"evaluation of {count} prompts")
            self.evaluating = None

    # ------------------------------------------------------------ checks of received batches

    def check(self, batch: Batch, payloads: list[Payload]) -> None:
        """Check a shard against the guarantees of every batch."""
        expect = self.sim.expect
        owned = [i for i, owner in enumerate(batch.ranks) if owner == self.rank]
        expect(
            sorted(batch.mine) == owned, f"batch {batch.step}: rank {self.rank} got others' rows"
        )
        expect(len(payloads) == len(owned), f"batch {batch.step}: payloads are missing")
        for index, payload in zip(batch.mine, payloads, strict=True):
            self.check_payload(batch.step, batch.headers[index], payload)

    def check_payload(self, step: int, header: TrajectoryHeader, payload: Payload) -> None:
        """Check that a payload matches its header, is of one attempt, and young enough."""
        expect, name = self.sim.expect, header.trajectory_id
        segments = decode_segments(payload)
        expect(len(segments) == 1, f"{name}: {len(segments)} segments: turns of several attempts")
        tokens = array("i", segments[0].tokens)
        versions = array("i", segments[0].versions)
        seq, member = int(header.group_id[1:]), header.member
        expect(tuple(tokens[:2]) == (seq, member), f"{name} has the tokens of {tuple(tokens[:2])}")
        expect([len(tokens)] == header.segment_lengths, f"{name}: wrong length")
        sampled = [v for v, m in zip(versions, segments[0].loss_mask, strict=True) if m]
        expect(len(sampled) == header.trained_tokens, f"{name}: wrong number of sampled tokens")
        expect(min(sampled) == header.oldest_version, f"{name}: wrong oldest version")
        self.check_turns(name, tokens, versions, segments[0])
        if self.scenario.policy != "mask":
            age = step - min(sampled)
            expect(
                age <= self.scenario.eta,
                f"{name}: age {age} in step {step}, η is {self.scenario.eta}",
            )

    def check_turns(self, name: str, tokens: Any, versions: Any, segment: Segment) -> None:
        """Check that each sampled span equals one whole generation and follows its prompt."""
        mask, logprobs = segment.loss_mask, array("f", segment.logprobs)
        end, turns = 0, 0
        while (begin := mask.find(1, end)) >= 0:
            end = mask.find(0, begin)
            end = len(mask) if end < 0 else end
            found = tuple(tokens[:begin]), tuple(tokens[begin:end]), tuple(versions[begin:end])
            number = tokens[end - 1] - MARK
            whole = found == self.sim.outputs.get(number)
            self.sim.expect(whole, f"{name}: {found} is not what generation {number} returned")
            right = [logprob(t) for t in tokens[begin:end]] == list(logprobs[begin:end])
            self.sim.expect(right, f"{name}: logprobs of other tokens")
            turns += 1
        self.sim.expect(turns == self.scenario.turns, f"{name} has {turns} turns")
