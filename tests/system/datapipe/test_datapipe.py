"""Datapipe, worker links and trainer links in one event loop, and the trainer in a thread."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
import zmq
from structlog.testing import capture_logs

from arealite.api.config import ExperimentConfig, run_paths
from arealite.api.llm import LLMResponse
from arealite.api.rollout_messages import Episode, Lease, TurnHeader
from arealite.api.trainer_messages import Checkpointed, Finish, Published, StepReport, Waiting
from arealite.api.turns import Turn, encode_turn
from arealite.base.errors import InvariantError, RoleError, UserError
from arealite.system.datapipe import datapipe, trainer_request_handler
from arealite.system.datapipe.datapipe import Datapipe
from arealite.system.ledger.ledger import connect
from arealite.system.links.trainer_link import TrainerLink
from arealite.system.links.worker_link import Turns
from tests.system.scenes import (
    FakeWorker,
    episode,
    experiment,
    failed,
    in_thread,
    payload,
    piped,
    saved,
    tasks,
)
from tests.waiting import eventually


def train(
    link: TrainerLink,
    config: ExperimentConfig,
    *,
    steps: int,
    begin: int = 0,
    finish: bool = True,
    on_step: Callable[[int], object] = lambda step: None,
) -> list[list[str]]:
    """Train with one rank; return the trajectory ids of each step."""
    seen: list[list[str]] = []
    assert link.start(begin).step == begin
    link.report(Published(begin))
    for step in range(begin, begin + steps):
        answer = link.next_batch(step)
        assert answer is not None
        batch, payloads = answer
        ids = [h.trajectory_id for h in batch.headers]
        assert [payload(batch.headers[i]) for i in batch.mine] == payloads
        assert all(step - h.oldest_version <= 2 for h in batch.headers)
        seen.append(ids)
        on_step(step)
        link.report(StepReport(step, ids, {}))
        link.report(Published(step + 1))
    if finish:
        link.report(Checkpointed(*saved(config, begin + steps)))
        link.report(Finish("test over"))
    link.close()
    return seen


def stored(index: int) -> bytes:
    """Return a turn of one token, as a worker sends it."""
    response = LLMResponse([index], [-1.0], [0], "stop", 0)
    return encode_turn(Turn(response, 1.0, index=index, prompt=bytes(16)))


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that ends the time in which a failed datapipe refuses requests."""
    monkeypatch.setattr(datapipe, "REFUSAL_S", 600.0)
    return lambda: monkeypatch.setattr(datapipe, "REFUSAL_S", 0.0)


@asynccontextmanager
async def expired(pipe: Datapipe, worker_id: str) -> AsyncGenerator[None, None]:
    """Expire a dead worker, even if one of its messages arrives late."""

    async def turn_clock() -> None:
        while True:
            if worker := pipe.workers.by_id.get(worker_id):
                worker.last_seen -= pipe.workers.ttl_s
            await asyncio.sleep(0.01)

    turning = asyncio.create_task(turn_clock())
    try:
        yield
    finally:
        turning.cancel()
        await asyncio.gather(turning, return_exceptions=True)


async def all_durable(pipe: Datapipe) -> None:
    """Wait until the ledger's file has the current state of the store."""
    done = asyncio.Event()
    pipe.writer.after_commit(done.set, hurry=True)
    await done.wait()


async def test_run_over_inproc_trains_all_steps(tmp_path: Path) -> None:
    config = experiment(tmp_path)
    context = zmq.Context()
    async with piped(config, address="inproc://pipe", context=context) as pipe:
        workers = [
            FakeWorker(lambda: pipe.address, worker_id=f"w{n}", capacity=3, context=context)
            for n in range(2)
        ]
        running = [asyncio.create_task(worker.run()) for worker in workers]
        await eventually(
            lambda: len(pipe.workers.by_id) == 2
        )  # a worker that joins later gets no Drain
        link = TrainerLink(lambda: pipe.address, rank=0, world_size=1, context=context)
        seen = await in_thread(lambda: train(link, config, steps=6))
        await asyncio.gather(*running)
    flat = [t for ids in seen for t in ids]
    assert len(flat) == 6 * 4 == len(set(flat))
    assert pipe.store.counts["durable"] == 12
    context.term()


async def test_two_ranks_get_disjoint_shards_of_one_batch(tmp_path: Path) -> None:
    async with piped(experiment(tmp_path)) as pipe:
        worker = FakeWorker(lambda: pipe.address)
        running = asyncio.create_task(worker.run())
        links = [TrainerLink(lambda: pipe.address, rank=r, world_size=2) for r in range(2)]

        def body() -> None:
            links[0].start(0)
            links[1].ticket = links[0].ticket
            links[0].report(Published(0))
            answers = [link.next_batch(0) for link in links]
            again = links[1].next_batch(0)
            assert answers[0] and answers[1] and again
            first, second = answers[0][0], answers[1][0]
            assert first.headers == second.headers
            assert first.ranks == second.ranks
            assert sorted(first.mine + second.mine) == list(range(len(first.headers)))
            assert again == answers[1]
            links[0].report(StepReport(0, [h.trajectory_id for h in first.headers], {}))
            links[0].report(Checkpointed(*saved(pipe.config, 1)))
            links[0].report(Finish("over"))

        await in_thread(body)
        await running
        for link in links:
            link.close()


async def test_evaluation_runs_during_training(tmp_path: Path) -> None:
    config = experiment(tmp_path, samples=2)
    async with piped(config, eval_rows=4) as pipe:
        worker = FakeWorker(lambda: pipe.address)
        running = asyncio.create_task(worker.run())
        link = TrainerLink(lambda: pipe.address, rank=0, world_size=1)

        def body() -> dict[str, float]:
            link.start(0)
            link.report(Published(0))
            link.evaluate(0)
            link.evaluate(1)
            first, second = link.eval_result(wait=True), link.eval_result(wait=True)
            assert first and second and link.eval_result(wait=True) is None
            assert {first.eval_id, second.eval_id} == {0, 1}
            assert first.metrics == second.metrics
            link.evaluate(1)  # asked again: answered from the ledger
            assert link.eval_result(wait=True) == {r.eval_id: r for r in (first, second)}[1]
            link.report(Finish("over"))
            return first.metrics

        metrics = await in_thread(body)
        await running
        link.close()
    assert metrics["eval/reward"] == 0.5
    assert metrics["eval/pass@2"] == 1.0
    assert metrics["eval/num_prompts"] == 4.0
    assert metrics["eval/reward/s1"] == 0.5
    assert metrics["eval/failed"] == 0.0
    assert any(lease.split == "eval-1" for lease in worker.leases)


async def test_stop_ends_the_wait_for_an_evaluation(tmp_path: Path) -> None:
    async with piped(experiment(tmp_path), eval_rows=4) as pipe:
        link = TrainerLink(lambda: pipe.address, rank=0, world_size=1)
        waits: list[str] = []

        def on_wait(waiting: Waiting) -> bool:
            if "silent" in waiting.detail:  # the link's own detail, if the datapipe's is late
                return False
            waits.append(f"{waiting.request}: {waiting.detail}")
            return True

        def body() -> None:
            link.start(0)
            link.report(Published(0))
            link.evaluate(0)
            assert link.eval_result(wait=True, on_wait=on_wait) is None
            assert not pipe.requests.finish, "only the wait ends"
            link.report(Finish("asked to stop"))

        await in_thread(body)
        link.close()
    assert waits == ["EvalRequest 0: evaluation 0: 4 samples left, nothing in flight, no rollout "
                     "worker"]  # fmt: skip


async def test_leases_lost_by_a_restarted_worker_count_as_attempts(tmp_path: Path) -> None:
    """Each restart of a worker id without its leases counts as one attempt."""
    config = experiment(tmp_path, num_groups=1, group_size=1, max_staleness=0, max_attempts=2)
    async with piped(config, eval_rows=1) as pipe:
        link = TrainerLink(lambda: pipe.address, rank=0, world_size=1)
        struck = asyncio.Event()

        def deadly(lease: Lease, member: int) -> Episode | None:
            if lease.group_id in ("g0", "e0-0"):
                struck.set()
                return None
            return episode(lease, member, version=0)

        async def die_often() -> None:
            """Each worker runs until a lease kills it; the last worker runs until the drain."""
            while True:
                struck.clear()
                worker = FakeWorker(lambda: pipe.address, script=deadly)
                running = asyncio.create_task(worker.run())
                death = asyncio.create_task(struck.wait())
                await asyncio.wait([running, death], return_when=asyncio.FIRST_COMPLETED)
                if not death.done():
                    death.cancel()
                    return await running
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

        def body() -> list[str]:
            link.start(0)
            link.report(Published(0))
            link.evaluate(0)
            result = link.eval_result(wait=True)
            assert result and result.metrics["eval/failed"] == 1.0
            answer = link.next_batch(0)
            assert answer
            link.report(Finish("over"))
            return [h.group_id for h in answer[0].headers]

        _, ids = await asyncio.gather(die_often(), in_thread(body))
        link.close()
    assert ids == ["g1"]
    assert pipe.store.counts["filtered:failed:worker_lost"] == 1


async def test_too_many_failures_stop_the_run_and_name_the_first(
    tmp_path: Path, refused: Callable[[], None]
) -> None:
    config = experiment(tmp_path, pipe={"max_failed_share": 0.05})
    pipe = Datapipe(config, train=tasks(5), eval=[], registry=None)
    running = asyncio.create_task(pipe.run())
    await pipe.ready.wait()
    worker = FakeWorker(lambda: pipe.address, script=lambda lease, m: failed(lease, m, "boom"))
    working = asyncio.create_task(worker.run())
    link = TrainerLink(lambda: pipe.address, rank=0, world_size=1)

    def body() -> None:
        link.start(0)
        link.report(Published(0))
        link.next_batch(0)

    with pytest.raises(InvariantError, match=r"max_failed_share.*boom: by the test"):
        await in_thread(body)
    refused()
    with pytest.raises(InvariantError, match="boom"):
        await running
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    link.close()


async def test_report_of_other_trajectories_is_refused(
    tmp_path: Path, refused: Callable[[], None]
) -> None:
    pipe = Datapipe(experiment(tmp_path), train=tasks(5), eval=[], registry=None)
    running = asyncio.create_task(pipe.run())
    await pipe.ready.wait()
    worker = FakeWorker(lambda: pipe.address)
    working = asyncio.create_task(worker.run())
    link = TrainerLink(lambda: pipe.address, rank=0, world_size=1)

    def body() -> None:
        link.start(0)
        link.report(Published(0))
        answer = link.next_batch(0)
        assert answer
        ids = [h.trajectory_id for h in answer[0].headers]
        link.report(StepReport(0, [*ids[:-1], ids[0]], {}))

    with pytest.raises(InvariantError, match="they differ in"):
        await in_thread(body)
    refused()
    with pytest.raises(InvariantError):
        await running
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    link.close()


async def test_leases_expire_when_the_worker_is_silent(tmp_path: Path) -> None:
    """The silent worker has all leases, so no step is trained until another worker gets them."""
    async with piped(experiment(tmp_path, max_staleness=0)) as pipe:
        mute = FakeWorker(lambda: pipe.address, worker_id="mute", script=lambda lease, m: None)
        muted = asyncio.create_task(mute.run())
        link = TrainerLink(lambda: pipe.address, rank=0, world_size=1)
        waits: list[str] = []
        loop, waited = asyncio.get_running_loop(), asyncio.Event()

        def on_wait(waiting: Waiting) -> bool:
            if "on mute" in waiting.detail:
                waits.append(waiting.detail)
                loop.call_soon_threadsafe(waited.set)
            return False

        def body() -> list[str]:
            link.start(0)
            link.report(Published(0))
            answer = link.next_batch(0, on_wait=on_wait)
            assert answer
            ids = [h.trajectory_id for h in answer[0].headers]
            link.report(StepReport(0, ids, {}))
            link.report(Checkpointed(*saved(pipe.config, 1)))
            link.report(Finish("over"))
            return ids

        async def kill_and_replace() -> None:
            await waited.wait()
            muted.cancel()
            await asyncio.gather(muted, return_exceptions=True)
            async with expired(pipe, "mute"):
                await FakeWorker(lambda: pipe.address, worker_id="good").run()

        _, ids = await asyncio.gather(kill_and_replace(), in_thread(body))
        link.close()
    assert len(set(ids)) == 4
    assert "0 of 2 groups" in waits[0]
    assert re.search(r"4 on mute.*oldest g0", waits[0])


async def test_stop_ends_the_wait_for_a_batch(tmp_path: Path) -> None:
    async with piped(experiment(tmp_path)) as pipe:
        link = TrainerLink(lambda: pipe.address, rank=0, world_size=1)

        def body() -> None:
            link.start(0)
            link.report(Published(0))
            assert link.next_batch(0, on_wait=lambda w: True) is None
            link.report(Checkpointed(*saved(pipe.config, 0)))
            link.report(Finish("asked to stop"))

        await in_thread(body)
        link.close()


async def test_restart_repeats_the_batch_and_keeps_the_buffer(tmp_path: Path) -> None:
    config = experiment(tmp_path)
    address = ""
    link = TrainerLink(lambda: address, rank=0, world_size=1)
    worker = FakeWorker(lambda: address)
    pipe = Datapipe(config, train=tasks(5), eval=[], registry=None)
    running = asyncio.create_task(pipe.run())
    await pipe.ready.wait()
    address = pipe.address
    working = asyncio.create_task(worker.run())
    first = await in_thread(lambda: train(link, config, steps=3, finish=False))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    async with piped(config) as pipe:
        address = pipe.address
        link = TrainerLink(lambda: address, rank=0, world_size=1)
        known = pipe.workers.by_id  # a worker that connects after the end gets no Drain
        await eventually(lambda: any(each.route for each in known.values()), "the worker")
        second = await in_thread(lambda: train(link, config, steps=3, begin=1))
        await working
    assert second[:2] == first[1:], "rolled-back batches come back as they were"
    flat = [t for ids in [first[0], *second] for t in ids]
    assert len(flat) == len(set(flat)) == 16


async def test_another_dataset_is_refused(tmp_path: Path) -> None:
    config = experiment(tmp_path)
    Datapipe(config, train=tasks(5), eval=[], registry=None).ledger.close()
    with pytest.raises(UserError, match=r"dataset_rows=5, now it is 6.*another trial_name"):
        Datapipe(config, train=tasks(6), eval=[], registry=None)


async def test_tokens_older_than_their_lease_are_failures(tmp_path: Path) -> None:
    """A token that is older than its lease and breaks the staleness bound is not trained."""
    config = experiment(tmp_path, num_groups=1, group_size=1, max_staleness=0)
    async with piped(config) as pipe:
        worker = FakeWorker(
            lambda: pipe.address,
            script=lambda lease, m: episode(
                lease, m, version=0 if lease.lease_id.endswith(".3") else lease.version
            ),
        )
        running = asyncio.create_task(worker.run())
        link = TrainerLink(lambda: pipe.address, rank=0, world_size=1)
        seen = await in_thread(lambda: train(link, config, steps=4))
        await running
    assert len(seen) == 4
    assert pipe.store.late_results >= 1, "it counts again if it was sent again"
    with closing(connect(run_paths(config).ledger, read_only=True)) as db:
        assert db.execute("SELECT group_id, class FROM failures").fetchall() == [("g2", "too_old")]


async def test_stall_error_names_the_running_episode(
    tmp_path: Path, refused: Callable[[], None]
) -> None:
    config = experiment(tmp_path, pipe={"stall_timeout_s": 0.3})
    pipe = Datapipe(config, train=tasks(5), eval=[], registry=None)
    running = asyncio.create_task(pipe.run())
    await pipe.ready.wait()
    mute = FakeWorker(lambda: pipe.address, worker_id="mute", script=lambda lease, m: None)
    working = asyncio.create_task(mute.run())
    link = TrainerLink(lambda: pipe.address, rank=0, world_size=1)
    await in_thread(lambda: (link.start(0), link.report(Published(0))))
    await eventually(lambda: pipe.workers.by_id["mute"].in_flight == 8)
    with pytest.raises(InvariantError, match=r"stall_timeout_s.*8 on mute.*oldest g0"):
        await in_thread(lambda: link.next_batch(0))
    refused()
    with pytest.raises(InvariantError):
        await running
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    link.close()


async def test_error_names_a_silent_datapipe(tmp_path: Path) -> None:
    link = TrainerLink(lambda: "tcp://127.0.0.1:9", rank=3, world_size=4, silence_s=0.5)
    with pytest.raises(RoleError, match=r"tcp://127.0.0.1:9 has been silent.*rank 3.*Finish"):
        await in_thread(lambda: link.report(Finish("x")))
    link.close()


async def test_checkpoint_newer_than_the_ledger_is_refused(
    tmp_path: Path, refused: Callable[[], None]
) -> None:
    pipe = Datapipe(experiment(tmp_path), train=tasks(5), eval=[], registry=None)
    running = asyncio.create_task(pipe.run())
    await pipe.ready.wait()
    link = TrainerLink(lambda: pipe.address, rank=0, world_size=1)
    with pytest.raises(InvariantError, match=r"begins at step 4, but .* has only 0"):
        await in_thread(lambda: link.start(4))
    refused()
    with pytest.raises(InvariantError):
        await running
    link.close()


@pytest.fixture
def early_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report slow episodes after a short wait."""
    monkeypatch.setattr(datapipe, "WAITING_S", 0.1)
    monkeypatch.setattr(trainer_request_handler, "REPORT_SHARE", 0.01)


@pytest.mark.usefixtures("early_reports")
async def test_slow_episodes_that_hold_a_batch_back_are_reported(tmp_path: Path) -> None:
    """Batch 1 needs g0 of version 0; its second episode ends only after it was reported."""
    config = experiment(tmp_path, num_groups=1, max_staleness=1)
    loop, named = asyncio.get_running_loop(), asyncio.Event()
    slow: list[Lease] = []

    def script(lease: Lease, member: int) -> Episode | None:
        if (lease.group_id, member) == ("g0", 1):
            slow.append(lease)
            return None
        return episode(lease, member)

    async with piped(config) as pipe:
        worker = FakeWorker(lambda: pipe.address, worker_id="rollout-0", script=script)
        running = asyncio.create_task(worker.run())
        link = TrainerLink(lambda: pipe.address, rank=0, world_size=1)
        waits: list[str] = []
        shares: list[dict[str, float]] = []

        def on_wait(waiting: Waiting) -> bool:
            waits.append(waiting.detail)
            if any(log["event"] == "trainer waits for slow episodes" for log in logs):
                loop.call_soon_threadsafe(named.set)
            return False

        def body() -> None:
            link.start(0)
            link.report(Published(0))
            for step in range(3):
                answer = link.next_batch(step, on_wait=on_wait)
                assert answer
                shares.append(answer[0].waits)
                link.report(StepReport(step, [h.trajectory_id for h in answer[0].headers], {}))
                link.report(Published(step + 1))
            link.report(Checkpointed(*saved(pipe.config, 3)))
            link.report(Finish("over"))

        async def free() -> None:
            async with asyncio.timeout(60):
                await named.wait()
            late = episode(slow[0], 1)
            worker.link.submit(late, [payload(late.headers[0])])

        with capture_logs() as logs:
            await asyncio.gather(free(), in_thread(body))
        await running
        link.close()
    (warning,) = [log for log in logs if log["event"] == "trainer waits for slow episodes"]
    (name,) = warning["episodes"]
    assert re.fullmatch(r"g0/1 \(train-\d\) of version 0 on rollout-0 since \d+\.\d s", name)
    assert warning["ended_by"] == "collector.episode_timeout_s=600"
    assert warning["log_level"] == "warning"
    assert warning["share"] >= 0.01
    said = "batch 1: 1 of 1 groups, kept back for slow episodes: g0/1 (train-"
    assert any(said in text for text in waits)
    assert shares[0]["slow_episodes_wait_s"] == 0.0
    assert shares[1]["slow_episodes_wait_s"] > 0.2
    assert shares[1]["slow_episodes_wait_share"] > 0.01
    assert shares[2]["slow_episodes_wait_share"] < shares[1]["slow_episodes_wait_share"]
    assert shares[1]["ledger_busy_s"] > 0.0


async def test_turns_survive_restarts_of_worker_and_datapipe(tmp_path: Path) -> None:
    """Turns are sent once, resent to the restarted datapipe, and sent with the next lease."""
    config = experiment(tmp_path, num_groups=1, group_size=2, max_staleness=0)
    address, starts = "", 1
    dying = FakeWorker(lambda: address, worker_id="a", script=lambda lease, m: None)

    def progress(anew: bool) -> Iterator[Turns]:
        if dying.leases and (anew or starts == 1):
            turns = [TurnHeader(1, "agent", n, 0) for n in range(starts)]
            yield dying.leases[0], turns, [stored(t.index) for t in turns]

    dying.link.progress = progress

    def kept(pipe: Datapipe) -> int:
        return len(pipe.store.groups["g0"].turns.get(1, {})) if "g0" in pipe.store.groups else 0

    pipe = Datapipe(config, train=tasks(5), eval=[], registry=None)
    running = asyncio.create_task(pipe.run())
    await pipe.ready.wait()
    address = pipe.address
    link = TrainerLink(lambda: address, rank=0, world_size=1)
    await in_thread(lambda: (link.start(0), link.report(Published(0))))
    working = asyncio.create_task(dying.run())
    await eventually(lambda: kept(pipe) == 1)
    await all_durable(pipe)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    starts = 2

    async with piped(config) as pipe:
        address = pipe.address
        assert kept(pipe) == 1
        await eventually(lambda: kept(pipe) == 2)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        frames: dict[str, list[bytes]] = {}

        def script(lease: Lease, member: int) -> Episode:
            frames.setdefault(lease.lease_id, worker.link.take_turns(lease))
            return episode(lease, member, reward=member)

        worker = FakeWorker(lambda: address, worker_id="b", script=script)
        async with expired(pipe, "a"):
            healing = asyncio.create_task(worker.run())
            seen = await in_thread(lambda: train(link, config, steps=2))
            await healing
    assert [len(ids) for ids in seen] == [2, 2]
    first = worker.leases[0]
    second = next(lease for lease in worker.leases if lease.group_id != "g0")
    assert (first.group_id, sorted(first.members), len(first.turns)) == ("g0", [0, 1], 2)
    assert frames[first.lease_id] == [stored(0), stored(1)]
    assert (second.turns, frames[second.lease_id]) == ([], [])


async def test_unfinished_members_of_a_lease_survive_a_restart_of_all_roles(
    tmp_path: Path,
) -> None:
    """After a kill of the run, unfinished episodes resume and finished ones do not rerun."""
    config = experiment(tmp_path, num_groups=1, group_size=2, max_staleness=0)
    dying = FakeWorker(
        lambda: pipe.address,
        script=lambda lease, m: episode(lease, m, reward=m) if m == 0 else None,
    )

    def progress(anew: bool) -> Iterator[Turns]:
        if dying.leases:
            yield dying.leases[0], [TurnHeader(1, "agent", 0, 0)], [stored(0)]

    dying.link.progress = progress
    pipe = Datapipe(config, train=tasks(5), eval=[], registry=None)
    running = asyncio.create_task(pipe.run())
    await pipe.ready.wait()
    link = TrainerLink(lambda: pipe.address, rank=0, world_size=1)
    await in_thread(lambda: (link.start(0), link.report(Published(0))))
    working = asyncio.create_task(dying.run())

    def is_kept() -> bool:
        group = pipe.store.groups.get("g0")
        return bool(group and group.turns.get(1) and 0 in group.finished)

    await eventually(is_kept)
    await all_durable(pipe)
    working.cancel()
    running.cancel()
    await asyncio.gather(working, running, return_exceptions=True)

    async with piped(config) as pipe:
        worker = FakeWorker(lambda: pipe.address)
        healing = asyncio.create_task(worker.run())
        seen = await in_thread(lambda: train(link, config, steps=1))
        await healing
    first = worker.leases[0]
    assert (first.group_id, first.members, len(first.turns)) == ("g0", [1], 1)
    assert sorted(seen[0]) == ["g0/0/agent", "g0/1/agent"]
