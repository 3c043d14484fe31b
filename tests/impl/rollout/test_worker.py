"""A worker with a fake link: it runs leases, submits results and drains without loss."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

import msgspec
import pytest

from arealite.api.episode import EpisodeRecord
from arealite.api.llm import SamplingConfig
from arealite.api.rollout_messages import Episode, Lease, TurnHeader
from arealite.api.turns import encode_turn
from arealite.base.errors import EpisodeError, InvariantError, RoleError
from arealite.impl.rollout import worker as module
from arealite.impl.rollout.worker import RolloutWorker
from arealite.system.health import vitals
from arealite.system.links.worker_link import EpisodeTurns
from tests.fakes.client import ScriptedClient, response
from tests.fakes.experiment import experiment, lease, tokenizer
from tests.impl.rollout import worlds


class FakeLink:
    """A link with leases from a queue that keeps results; None in the queue is a Drain."""

    def __init__(self) -> None:
        self.leases: asyncio.Queue[Lease | None] = asyncio.Queue()
        self.submitted: list[tuple[Episode, list[bytes]]] = []
        self.drained = asyncio.Event()
        self.metrics: Callable[[], dict[str, float]] = dict
        self.progress: Callable[[bool], Iterable[EpisodeTurns]] = lambda anew: ()
        self.turns: dict[str, list[bytes]] = {}
        self.seen = asyncio.Event()
        self.error: Exception | None = None

    async def run(self) -> None:
        await self.drained.wait()
        if self.error is not None:
            raise self.error

    async def next_lease(self) -> Lease | None:
        return await self.leases.get()

    def take_turns(self, lease: Lease) -> list[bytes]:
        return self.turns.pop(lease.lease_id)

    def submit(self, episode: Episode, payloads: list[bytes]) -> None:
        self.submitted.append((episode, payloads))
        self.seen.set()

    def drain(self) -> None:
        self.drained.set()

    async def results(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.submitted) < count:
                self.seen.clear()
                await self.seen.wait()


@asynccontextmanager
async def running(env: str = "world", script=None, **settings) -> AsyncIterator:
    assert worlds is not None
    link = FakeLink()
    client = ScriptedClient(script or (lambda request: response([10, 11, 12])))
    worker = RolloutWorker(
        experiment(env, **settings), link=link, client=client, tokenizer=tokenizer()
    )
    task = asyncio.create_task(worker.run())
    try:
        yield worker, link, client, task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_every_member_of_a_lease_is_run_and_submitted_once() -> None:
    async with running() as (_, link, client, task):
        for number in range(5):
            link.leases.put_nowait(lease(number, members=4, prompt="ok"))
        await link.results(20)
        link.leases.put_nowait(None)
        await task
    done = {(episode.group_id, episode.member) for episode, _ in link.submitted}
    assert done == {(f"g{number}", member) for number in range(5) for member in range(4)}
    assert all(len(payloads) == len(episode.headers) == 1 for episode, payloads in link.submitted)
    metrics = link.metrics()
    assert (metrics["episodes"], metrics["tokens"], metrics["running"]) == (20, 60, 0)
    assert metrics["client_requests"] == 20
    assert metrics["lease_wait_s"] > 0
    assert metrics["generation_wait_s"] > 0
    assert not client.is_open
    assert link.drained.is_set()


async def test_episodes_run_concurrently_and_are_submitted_as_they_finish() -> None:
    async with running() as (_, link, client, _task):
        client.gate.clear()
        link.leases.put_nowait(lease(0, members=6, prompt="ok"))
        await client.received(6)
        link.leases.put_nowait(lease(1, members=2, prompt="silent"))
        await link.results(2)
        assert {episode.group_id for episode, _ in link.submitted} == {"g1"}
        client.gate.set()
        await link.results(8)


async def test_lease_with_recorded_turns_resumes_and_is_counted() -> None:
    async with running("counter") as (_, link, client, _task):
        client.gate.clear()
        link.leases.put_nowait(lease(0, members=2, prompt="ab"))
        await client.received(2)
        assert list(link.progress(False)) == [], "nothing is generated yet"
        answer, standing = client.generate, asyncio.Barrier(3)

        async def generate(request):
            if request.request_id.endswith("/2"):
                await standing.wait()
                await asyncio.Event().wait()
            return await answer(request)

        client.generate = generate
        client.gate.set()
        await standing.wait()
        told = list(link.progress(False))
    assert [[t.index for t in turns] for _, turns, _ in told] == [[0, 1], [0, 1]]
    turns = [turn for _, turns, _ in told for turn in turns]
    async with running("counter") as (worker, link, client, _task):
        work = msgspec.structs.replace(lease(1, members=2, prompt="ab"), turns=turns)
        link.turns[work.lease_id] = [payload for _, _, payloads in told for payload in payloads]
        link.leases.put_nowait(work)
        await link.results(2)
        assert [request.request_id for request in client.requests] == [
            "l1/0/agent/2",
            "l1/1/agent/2",
        ]
    metrics = worker.metrics()
    assert (metrics["resumed_episodes"], metrics["resumed_tokens"]) == (2, 12)
    assert (metrics["resumed_diverged"], metrics["tokens"]) == (0, 18)
    assert link.turns == {}


async def test_recorded_turns_are_sent_only_to_a_new_datapipe() -> None:
    async with running("counter") as (_, link, client, _task):
        client.gate.clear()
        turn = EpisodeRecord().begin([3, 4], SamplingConfig())
        turn.response = response([10, 11])
        header = TurnHeader(member=0, seat="agent", index=0, oldest_version=1)
        work = msgspec.structs.replace(lease(1, prompt="01"), turns=[header])
        link.turns[work.lease_id] = [encode_turn(turn)]
        link.leases.put_nowait(work)
        await client.received(1)
        assert client.requests[0].request_id.endswith("/1")
        assert list(link.progress(False)) == []
        ((_, told, payloads),) = link.progress(True)
    assert (told, payloads) == ([header], [encode_turn(turn)])


async def test_failed_episode_does_not_stop_the_worker() -> None:
    def script(request):
        return EpisodeError("no") if request.group_id == "g0" else response([10])

    async with running(script=script) as (worker, link, _, task):
        link.leases.put_nowait(lease(0, prompt="ok"))
        crash = lease(1, prompt="crash")
        crash.task.extra_info["data_source"] = "trivia"
        link.leases.put_nowait(crash)
        link.leases.put_nowait(lease(2, prompt="ok"))
        await link.results(3)
        link.leases.put_nowait(None)
        await task
    failures = {e.group_id: e.failure and e.failure.failure_class for e, _ in link.submitted}
    assert failures == {"g0": "episode", "g1": "error:KeyError", "g2": None}
    assert worker.metrics()["failed_error:KeyError"] == 1
    assert worker.metrics()["failed_error:KeyError/trivia"] == 1
    assert worker.metrics()["failed_episode"] == 1


async def test_duplicate_lease_runs_once() -> None:
    async with running() as (_, link, client, _task):
        client.gate.clear()
        link.leases.put_nowait(lease(0, members=2, prompt="ok"))
        link.leases.put_nowait(lease(0, members=2, prompt="ok"))
        link.leases.put_nowait(lease(1, prompt="silent"))
        await link.results(1)
        assert len(client.requests) == 2


async def test_invariant_error_stops_the_worker_and_closes_its_environment() -> None:
    closed = worlds.World.closed
    async with running() as (_, link, client, task):
        link.leases.put_nowait(lease(0, prompt="broken"))
        with pytest.raises(InvariantError, match="cannot be"):
            await task
        assert not client.is_open
    assert worlds.World.closed == closed + 1


async def test_silent_datapipe_stops_the_worker_and_its_generations() -> None:
    async with running() as (_, link, client, task):
        client.gate.clear()
        link.leases.put_nowait(lease(0, prompt="ok"))
        await client.received(1)
        link.error = RoleError("has not heard a datapipe")
        link.drained.set()
        with pytest.raises(RoleError, match="datapipe"):
            await task
        assert client.cancelled == ["l0/0/agent/0"]
        assert not client.is_open


async def test_drain_aborts_episodes_after_the_grace_period(monkeypatch) -> None:
    monkeypatch.setattr(module, "DRAIN_GRACE_S", 0.1)
    async with running() as (_, link, client, task):
        link.leases.put_nowait(lease(0, prompt="slow"))
        await client.received(1)
        client.gate.clear()
        link.leases.put_nowait(lease(1, prompt="ok"))
        await client.received(2)
        link.leases.put_nowait(None)
        await task
        assert client.cancelled == ["l1/0/agent/0"]
    assert link.submitted == []  # these leases get no result


async def test_drain_submits_episodes_that_finish_within_the_grace_period(monkeypatch) -> None:
    monkeypatch.setattr(module, "DRAIN_GRACE_S", 600.0)
    async with running() as (_, link, client, task):
        client.gate.clear()
        link.leases.put_nowait(lease(0, members=3, prompt="ok"))
        await client.received(3)
        link.leases.put_nowait(None)
        await asyncio.sleep(0)
        client.gate.set()
        await task
    assert len(link.submitted) == 3


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
async def test_sigterm_drains_the_worker() -> None:
    async with running() as (_, link, client, task):
        link.leases.put_nowait(lease(0, prompt="ok"))
        await link.results(1)
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(60):
            await task
    assert link.drained.is_set()
    assert not client.is_open


async def test_metrics_have_the_event_loop_lag(monkeypatch) -> None:
    monkeypatch.setattr(vitals, "lag_max_s", lambda: 0.5)
    async with running() as (worker, _, _, _task):
        assert worker.metrics()["loop_lag_max_s"] == 0.5
