"""Datapipe, worker links and trainer links in one event loop, and the trainer in a thread."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
from structlog.testing import capture_logs

from arealite.api.llm import LLMResponse
from arealite.api.rollout_messages import Episode, Lease, TurnHeader
from arealite.api.trainer_messages import Finish, Published, StepReport, Waiting
from arealite.api.turns import Turn, encode_turn
from arealite.base.errors import RoleError, UserError
from arealite.system.datapipe import machine, trainer_request_handler
from arealite.system.datapipe.datapipe import Datapipe
from arealite.system.links.trainer_link import TrainerLink
from arealite.system.links.worker_link import EpisodeTurns
from tests.system.live import StartPipe, begin, finish, next_ids
from tests.system.scenes import episode, experiment, failed, in_thread, payload, tasks
from tests.waiting import eventually


def stored(index: int) -> bytes:
    """Return a turn of one token, as a worker sends it."""
    response = LLMResponse(
        output_ids=[index], logprobs=[-1.0], versions=[0], stop_reason="stop", interruptions=0
    )
    return encode_turn(Turn(response=response, temperature=1.0, index=index, prompt=bytes(16)))


@asynccontextmanager
async def expired(pipe: Datapipe, worker_id: str) -> AsyncGenerator[None, None]:
    """Expire a dead worker, even if one of its messages arrives late."""

    async def turn_clock() -> None:
        while True:
            if worker := pipe.machine.workers.by_id.get(worker_id):
                worker.last_seen -= pipe.machine.workers.ttl_s
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


async def test_run_over_inproc_trains_all_steps(start_pipe: StartPipe) -> None:
    context = zmq.Context()
    live = await start_pipe(endpoint="inproc://pipe", context=context)
    for number in range(2):
        live.work(worker_id=f"w{number}", capacity=3)
    # A worker that joins later gets no Drain.
    await eventually(lambda: len(live.pipe.machine.workers.by_id) == 2)
    seen = await live.train(steps=6)
    await live.end()
    flat = [t for ids in seen for t in ids]
    assert len(flat) == 6 * 4 == len(set(flat))
    assert live.pipe.machine.store.counts["durable"] == 12
    context.term()


async def test_two_ranks_get_disjoint_shards_of_one_batch(start_pipe: StartPipe) -> None:
    live = await start_pipe()
    live.work()
    other = live.connect(rank=1, world_size=2)
    live.link.world_size = 2

    def body(link: TrainerLink) -> None:
        begin(link)
        other.ticket = link.ticket
        answers = [link.next_batch(0), other.next_batch(0)]
        again = other.next_batch(0)
        assert answers[0] and answers[1] and again
        first, second = answers[0][0], answers[1][0]
        assert first.headers == second.headers
        assert first.ranks == second.ranks
        assert sorted(first.mine + second.mine) == list(range(len(first.headers)))
        assert again == answers[1]
        link.report(
            StepReport(step=0, trained=[h.trajectory_id for h in first.headers], metrics={})
        )
        finish(link, live.config, 1)
        other.close()

    await live.trainer(body)
    await live.end()


async def test_evaluation_runs_during_training(start_pipe: StartPipe) -> None:
    live = await start_pipe(samples=2, eval_rows=4)
    worker = live.work()

    def body(link: TrainerLink) -> dict[str, float]:
        begin(link)
        link.evaluate(0)
        link.evaluate(1)
        first, second = link.eval_result(wait=True), link.eval_result(wait=True)
        assert first and second and link.eval_result(wait=True) is None
        assert {first.eval_id, second.eval_id} == {0, 1}
        assert first.metrics == second.metrics
        link.evaluate(1)  # asked again: answered from the ledger
        assert link.eval_result(wait=True) == {r.eval_id: r for r in (first, second)}[1]
        link.report(Finish(reason="over"))
        return first.metrics

    metrics = await live.trainer(body)
    await live.end()
    assert metrics["eval/reward"] == 0.5
    assert metrics["eval/pass@2"] == 1.0
    assert metrics["eval/num_prompts"] == 4.0
    assert metrics["eval/reward/s1"] == 0.5
    assert metrics["eval/failed"] == 0.0
    assert any(lease.split == "eval-1" for lease in worker.leases)


async def test_stop_ends_the_wait_for_an_evaluation(start_pipe: StartPipe) -> None:
    live = await start_pipe(eval_rows=4)
    waits: list[str] = []

    def on_wait(waiting: Waiting) -> bool:
        if "silent" in waiting.detail:  # the link's own detail, if the datapipe's is late
            return False
        waits.append(f"{waiting.request}: {waiting.detail}")
        return True

    def body(link: TrainerLink) -> None:
        begin(link)
        link.evaluate(0)
        assert link.eval_result(wait=True, on_wait=on_wait) is None
        assert not live.pipe.machine.requests.finish, "only the wait ends"
        link.report(Finish(reason="asked to stop"))

    await live.trainer(body)
    await live.end()
    assert waits == ["EvalRequest 0: evaluation 0: 4 samples left, nothing in flight, no rollout "
                     "worker"]  # fmt: skip


async def test_leases_lost_by_a_restarted_worker_count_as_attempts(start_pipe: StartPipe) -> None:
    """Each restart of a worker id without its leases counts as one attempt."""
    live = await start_pipe(
        num_groups=1, group_size=1, max_staleness=0, max_attempts=2, eval_rows=1
    )
    struck = asyncio.Event()

    def deadly(lease: Lease, member: int) -> Episode | None:
        if lease.group_id in ("g0", "e0-0"):
            struck.set()
            return None
        return episode(lease, member, version=0)

    async def die_often() -> None:
        """Each worker runs until a lease kills it; the last worker runs until the drain."""
        while True:
            worker = live.work(script=deadly)
            await struck.wait()
            struck.clear()
            await live.kill_worker(worker)

    def body(link: TrainerLink) -> list[str]:
        begin(link)
        link.evaluate(0)
        result = link.eval_result(wait=True)
        assert result and result.metrics["eval/failed"] == 1.0
        ids = next_ids(link, 0)
        link.report(Finish(reason="over"))
        return ids

    dying = asyncio.create_task(die_often())
    ids = await live.trainer(body)
    dying.cancel()
    await live.end()
    assert ids == ["g1/0/agent"]
    assert live.pipe.machine.store.counts["filtered:failed:worker_lost"] == 1


async def test_too_many_failures_stop_the_run_and_name_the_first(start_pipe: StartPipe) -> None:
    live = await start_pipe(pipe={"max_failed_share": 0.05})
    live.work(script=lambda lease, member: failed(lease, member, "boom"))

    def body(link: TrainerLink) -> None:
        begin(link)
        link.next_batch(0)

    await live.refused(body, match=r"max_failed_share.*boom: by the test")


async def test_report_of_other_trajectories_is_refused(start_pipe: StartPipe) -> None:
    live = await start_pipe()
    live.work()

    def body(link: TrainerLink) -> None:
        begin(link)
        ids = next_ids(link, 0)
        link.report(StepReport(step=0, trained=[*ids[:-1], ids[0]], metrics={}))

    await live.refused(body, match="they differ in")


async def test_leases_expire_when_the_worker_is_silent(start_pipe: StartPipe) -> None:
    """The silent worker has all leases, so no step is trained until another worker gets them."""
    live = await start_pipe(max_staleness=0)
    mute = live.work(worker_id="mute", script=lambda lease, member: None)
    loop, waited = asyncio.get_running_loop(), asyncio.Event()
    waits: list[str] = []

    def on_wait(waiting: Waiting) -> bool:
        if "on mute" in waiting.detail:
            waits.append(waiting.detail)
            loop.call_soon_threadsafe(waited.set)
        return False

    def body(link: TrainerLink) -> list[str]:
        begin(link)
        answer = link.next_batch(0, on_wait=on_wait)
        assert answer
        ids = [h.trajectory_id for h in answer[0].headers]
        link.report(StepReport(step=0, trained=ids, metrics={}))
        finish(link, live.config, 1)
        return ids

    training = asyncio.create_task(live.trainer(body))
    await waited.wait()
    await live.kill_worker(mute)
    async with expired(live.pipe, "mute"):
        live.work(worker_id="good")
        ids = await training
        await live.end()
    assert len(set(ids)) == 4
    assert "0 of 2 groups" in waits[0]
    assert re.search(r"4 on mute.*oldest g0", waits[0])


async def test_stop_ends_the_wait_for_a_batch(start_pipe: StartPipe) -> None:
    live = await start_pipe()

    def body(link: TrainerLink) -> None:
        begin(link)
        assert link.next_batch(0, on_wait=lambda w: True) is None
        finish(link, live.config, 0)

    await live.trainer(body)
    await live.end()


async def test_restart_repeats_the_batch_and_keeps_the_buffer(start_pipe: StartPipe) -> None:
    live = await start_pipe()
    live.work()
    first = await live.train(steps=3, finishes=False)
    await live.kill()
    await live.start()
    workers = live.pipe.machine.workers.by_id  # a worker that connects after the end gets no Drain
    await eventually(lambda: any(worker.route for worker in workers.values()), "the worker")
    second = await live.train(steps=3, first=1)
    await live.end()
    assert second[:2] == first[1:], "rolled-back batches come back as they were"
    flat = [t for ids in [first[0], *second] for t in ids]
    assert len(flat) == len(set(flat)) == 16


async def test_another_dataset_is_refused(tmp_path: Path) -> None:
    config = experiment(tmp_path)
    Datapipe(config=config, train=tasks(5), eval=[], registry=None).ledger.close()
    with pytest.raises(UserError, match=r"dataset_rows=5, now it is 6.*another trial_name"):
        Datapipe(config=config, train=tasks(6), eval=[], registry=None)


async def test_stall_error_names_the_running_episode(start_pipe: StartPipe) -> None:
    live = await start_pipe(pipe={"stall_timeout_s": 0.3})
    live.work(worker_id="mute", script=lambda lease, member: None)
    await live.begin()
    await eventually(lambda: live.pipe.machine.workers.by_id["mute"].in_flight == 8)
    match = r"stall_timeout_s.*8 on mute.*oldest g0"
    await live.refused(lambda link: link.next_batch(0), match=match)


async def test_error_names_a_silent_datapipe(tmp_path: Path) -> None:
    link = TrainerLink(resolve=lambda: "tcp://127.0.0.1:9", rank=3, world_size=4, silence_s=0.5)
    with pytest.raises(RoleError, match=r"tcp://127.0.0.1:9 has been silent.*rank 3.*Finish"):
        await in_thread(lambda: link.report(Finish(reason="x")))
    link.close()


async def test_checkpoint_newer_than_the_ledger_is_refused(start_pipe: StartPipe) -> None:
    live = await start_pipe()
    await live.refused(lambda link: link.start(4), match=r"begins at step 4, but .* has only 0")


@pytest.fixture
def early_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report slow episodes after a short wait."""
    monkeypatch.setattr(machine, "WAITING_S", 0.1)
    monkeypatch.setattr(trainer_request_handler, "REPORT_SHARE", 0.01)


@pytest.mark.usefixtures("early_reports")
async def test_slow_episodes_that_hold_a_batch_back_are_reported(start_pipe: StartPipe) -> None:
    """Batch 1 needs g0 of version 0; its second episode ends only after it was reported."""
    loop, named = asyncio.get_running_loop(), asyncio.Event()
    slow: list[Lease] = []
    waits: list[str] = []
    shares: list[dict[str, float]] = []

    def script(lease: Lease, member: int) -> Episode | None:
        if (lease.group_id, member) == ("g0", 1):
            slow.append(lease)
            return None
        return episode(lease, member)

    def on_wait(waiting: Waiting) -> bool:
        waits.append(waiting.detail)
        if any(log["event"] == "trainer waits for slow episodes" for log in logs):
            loop.call_soon_threadsafe(named.set)
        return False

    def body(link: TrainerLink) -> None:
        begin(link)
        for step in range(3):
            answer = link.next_batch(step, on_wait=on_wait)
            assert answer
            shares.append(answer[0].waits)
            link.report(
                StepReport(
                    step=step, trained=[h.trajectory_id for h in answer[0].headers], metrics={}
                )
            )
            link.report(Published(version=step + 1))
        finish(link, live.config, 3)

    live = await start_pipe(num_groups=1, max_staleness=1)
    worker = live.work(worker_id="rollout-0", script=script)
    with capture_logs() as logs:
        training = asyncio.create_task(live.trainer(body))
        async with asyncio.timeout(60):
            await named.wait()
        late = episode(slow[0], 1)
        worker.link.submit(late, [payload(late.headers[0])])
        await training
    await live.end()
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


async def test_turns_survive_restarts_of_worker_and_datapipe(start_pipe: StartPipe) -> None:
    """Turns are sent once, resent to the restarted datapipe, and sent with the next lease."""
    live = await start_pipe(num_groups=1, group_size=2, max_staleness=0)
    await live.begin()
    starts = 1
    dying = live.work(worker_id="a", script=lambda lease, member: None)

    def progress(anew: bool) -> Iterator[EpisodeTurns]:
        if dying.leases and (anew or starts == 1):
            turns = [
                TurnHeader(member=1, seat="agent", index=n, oldest_version=0) for n in range(starts)
            ]
            yield dying.leases[0], turns, [stored(t.index) for t in turns]

    dying.link.progress = progress

    def num_stored() -> int:
        group = live.pipe.machine.store.groups.get("g0")
        return len(group.turns.get(1, {})) if group else 0

    await eventually(lambda: num_stored() == 1)
    await all_durable(live.pipe)
    await live.kill()
    starts = 2
    await live.start()
    assert num_stored() == 1
    await eventually(lambda: num_stored() == 2)
    await live.kill_worker(dying)
    frames: dict[str, list[bytes]] = {}

    def script(lease: Lease, member: int) -> Episode:
        frames.setdefault(lease.lease_id, worker.link.take_turns(lease))
        return episode(lease, member, reward=member)

    async with expired(live.pipe, "a"):
        worker = live.work(worker_id="b", script=script)
        seen = await live.train(steps=2)
        await live.end()
    assert [len(ids) for ids in seen] == [2, 2]
    first = worker.leases[0]
    second = next(lease for lease in worker.leases if lease.group_id != "g0")
    assert (first.group_id, sorted(first.members), len(first.turns)) == ("g0", [0, 1], 2)
    assert frames[first.lease_id] == [stored(0), stored(1)]
    assert (second.turns, frames[second.lease_id]) == ([], [])


async def test_unfinished_members_of_a_lease_survive_a_restart_of_all_roles(
    start_pipe: StartPipe,
) -> None:
    """After a kill of the run, unfinished episodes resume and finished ones do not rerun."""
    live = await start_pipe(num_groups=1, group_size=2, max_staleness=0)
    await live.begin()
    dying = live.work(
        script=lambda lease, member: None if member else episode(lease, member, reward=member)
    )

    def progress(anew: bool) -> Iterator[EpisodeTurns]:
        if dying.leases:
            yield (
                dying.leases[0],
                [TurnHeader(member=1, seat="agent", index=0, oldest_version=0)],
                [stored(0)],
            )

    dying.link.progress = progress

    def is_stored() -> bool:
        group = live.pipe.machine.store.groups.get("g0")
        return bool(group and group.turns.get(1) and 0 in group.finished)

    await eventually(is_stored)
    await all_durable(live.pipe)
    await live.kill_worker(dying)
    await live.kill()
    await live.start()
    worker = live.work()
    seen = await live.train(steps=1)
    await live.end()
    first = worker.leases[0]
    assert (first.group_id, first.members, len(first.turns)) == ("g0", [1], 1)
    assert sorted(seen[0]) == ["g0/0/agent", "g0/1/agent"]
