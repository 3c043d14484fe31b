"""Messages of workers are validated; an invalid message stops no process and no run."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import closing
from typing import Any

import msgspec
import pytest
import zmq
from structlog.testing import capture_logs

from arealite.api.experiment_config import run_paths
from arealite.api.payloads import Payload
from arealite.api.rollout_messages import (
    Ack,
    Episode,
    Failure,
    Lease,
    Progress,
    Result,
    TurnHeader,
    WorkerState,
)
from arealite.api.trainer_messages import (
    BatchRequest,
    Checkpointed,
    EvalRequest,
    Finish,
    Published,
    StepReport,
    TrainerStart,
)
from arealite.ext.audit.audit import audit
from arealite.system.datapipe import workers
from arealite.system.datapipe.datapipe import Datapipe
from arealite.system.datapipe.message_checks import MAX_SENDERS, Rejections, check_episode
from arealite.system.ledger import group as open_group
from arealite.system.ledger.ledger import connect
from arealite.system.ledger.payload_checks import find_mismatch
from arealite.system.links import wire
from arealite.system.links.trainer_link import TrainerLink
from tests.payloads import GARBAGE, change_turn, pack, result_frames, with_digests
from tests.system.live import StartPipe, finish, next_ids
from tests.system.scenes import FakeWorker, episode, header, payload, tasks
from tests.waiting import eventually

replace = msgspec.structs.replace
HEADER = header("g0", 0, version=1, newest=2, tokens=8)


def changed(**fields: Any) -> Payload:
    """Return the payload of HEADER with changed fields of its turn."""
    return change_turn(payload(HEADER), **fields)


def flipped(frame: bytes, at: int) -> bytes:
    return frame[:at] + bytes([frame[at] ^ 0x40]) + frame[at + 1 :]


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (GARBAGE, "unreadable"),
        (replace(payload(HEADER), turns=payload(HEADER).turns[:-3]), "unreadable"),
        (replace(payload(HEADER), prompt=b""), "unreadable: turn 0 shares 4 tokens, at most 0"),
        (replace(payload(HEADER), prompt=bytes(18)), "arrays of other lengths"),
        (replace(payload(HEADER), prompt=b"\xff" * 16), "tokens"),
        (pack(b"", []), "length"),
        (changed(logprobs=b""), "arrays of other lengths"),
        (changed(versions=bytes(12)), "arrays of other lengths"),
        (changed(added=b"123"), "arrays of other lengths"),
        (changed(extras={"entropy": bytes(9)}), "arrays of other lengths"),
        (changed(routing=bytes(9)), "arrays of other lengths"),
        (changed(routing=bytes(9), routing_start=90), "arrays of other lengths"),
        (changed(ids=b"\xff" * 16), "tokens"),
        (changed(ids=b"\xff\xff\xff\x7f" * 4), "tokens"),
        (changed(added=bytes(4)), "length"),
        (changed(shared=0), "no prefix"),
        (changed(parent=0), "unreadable: turn 0 follows turn 0"),
        (changed(reason=""), "unreadable: turn 0 does not extend turn -1"),
        (changed(logprobs=b"\0\0\xc0\x7f" * 4), "logprobs"),
        (changed(temperature=math.nan), "temperature"),
        (changed(temperature=-1.0), "temperature"),
        (changed(versions=b"\2\0\0\0" * 4), "versions"),
        (changed(versions=b"\xff\xff\xff\xff\2\0\0\0" * 2), "versions"),
        (changed(reward=math.inf), "reward"),
        (changed(reward=math.nan), "reward"),
        (changed(reward=1e300), "reward"),
        (changed(reward=0.0), "reward"),
        (changed(reused=5, prompt_digest=b"x"), "receipt: range"),
        (changed(prompt_digest=b"x"), "receipt: prompt of 4 tokens"),
        (change_turn(with_digests(payload(HEADER)), answer_digest=b"x"), "receipt: answer after 4"),
        (payload(header("g0", 0, version=1, newest=2, tokens=10)), "length"),
    ],
)
def test_payload_that_differs_from_its_header_is_rejected(made: Payload, what: str) -> None:
    assert what in find_mismatch(HEADER, made, vocab_size=(1 << 31) - 1)
    assert find_mismatch(HEADER, payload(HEADER)) == ""


@pytest.mark.parametrize(("group", "is_right"), [("e0-0", True), ("g0", False)])
def test_greedy_trajectory_is_valid_only_in_an_evaluation(group: str, is_right: bool) -> None:
    """A trainer divides logits by the temperature."""
    about = replace(HEADER, group_id=group, trajectory_id=f"{group}/0/agent")
    whole = Episode(
        lease_id=f"{group}.1.1", group_id=group, member=0, headers=[about], failure=None
    )
    assert (check_episode(whole, [changed(temperature=0.0)], 2) == "") == is_right


def test_every_flipped_byte_of_a_payload_is_detected() -> None:
    made = with_digests(payload(HEADER))
    whole = replace(HEADER, digest=made.digest)
    assert find_mismatch(whole, made) == ""
    for name in ("prompt", "turns"):
        frame: bytes = getattr(made, name)
        for at in range(len(frame)):
            assert find_mismatch(whole, replace(made, **{name: flipped(frame, at)}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"trajectory_id": "g0/1/agent"},
        {"group_id": "g1"},
        {"member": 1},
        {"seat": "other"},
        {"reward": math.inf},
        {"seconds": math.nan},
        {"reward_parts": {"x": math.nan}},
        {"waits": {"x": -math.inf}},
        {"newest_version": 3},
        {"oldest_version": 0},
        {"trained_tokens": 5},
        {"segment_lengths": [4, 4]},
        {"reward": 2.0},
    ],
)
def test_impossible_header_is_rejected(wrong: dict[str, Any]) -> None:
    whole = Episode(lease_id="g0.1.1", group_id="g0", member=0, headers=[HEADER], failure=None)
    assert check_episode(whole, [payload(HEADER)], 2) == ""
    bad = replace(whole, headers=[replace(HEADER, **wrong)])
    assert check_episode(bad, [payload(HEADER)], 2)


def test_episode_needs_trajectories_or_a_failure() -> None:
    failure, made = Failure(failure_class="boom", detail=""), payload(HEADER)
    assert check_episode(
        Episode(lease_id="l", group_id="g0", member=0, headers=[], failure=None), [], 2
    )
    assert check_episode(
        Episode(lease_id="l", group_id="g0", member=0, headers=[HEADER], failure=failure), [made], 2
    )
    assert check_episode(
        Episode(lease_id="l", group_id="g0", member=0, headers=[HEADER, HEADER], failure=None),
        [made, made],
        2,
    )
    assert (
        check_episode(
            Episode(lease_id="l", group_id="g0", member=0, headers=[], failure=failure), [], 2
        )
        == ""
    )


# ---------------------------------------------------------------- through a live datapipe


class Peer:
    """A raw socket that sends any message to the datapipe."""

    def __init__(self, pipe: Datapipe) -> None:
        self.pipe, self.got = pipe, list[Any]()
        socket = wire.open_socket(None, zmq.DEALER)
        socket.connect(pipe.address)
        self.channel = wire.Channel(socket, lambda frames: self.got.append(frames))

    def say(self, message: Any, *payloads: bytes) -> None:
        frame = message if isinstance(message, bytes) else wire.encode(message)
        self.channel.send([frame, *payloads])

    def submit(
        self, episodes: Sequence[Episode], payloads: Sequence[Payload], worker_id: str = "bad"
    ) -> None:
        result, frames = result_frames(worker_id, episodes, payloads)
        self.say(result, *frames)

    async def rejected(self, count: int) -> None:
        await eventually(lambda: self.pipe.machine.requests.rejections.total() >= count)

    def messages(self, kind: type[Any]) -> list[Any]:
        found = [wire.decode_to_worker(frames[0]) for frames in self.got]
        return [message for message in found if isinstance(message, kind)]

    def acknowledged(self) -> int:
        """Return the number of acknowledged results."""
        return sum(ack.digest != b"" for ack in self.messages(Ack))

    async def leased(self, name: str, capacity: int = 4) -> list[Lease]:
        """Accept leases like a worker that never finishes them."""
        self.say(
            WorkerState(worker_id=name, capacity=capacity, held=[], split_metrics={}, process="1")
        )
        leases: Callable[[], list[Lease]] = lambda: self.messages(Lease)  # noqa: E731
        await eventually(lambda: sum(len(lease.members) for lease in leases()) >= capacity)
        return leases()


@pytest.fixture
async def peer(
    start_pipe: StartPipe, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[Peer, None]:
    """A peer of a datapipe whose trainer has published version 0; the run must still complete."""
    monkeypatch.setattr(open_group, "BACK_OFF_S", 0.0)
    live = await start_pipe(max_staleness=0)
    await live.begin()
    peer = Peer(live.pipe)
    yield peer
    peer.say(WorkerState(worker_id="bad", capacity=0, held=[], split_metrics={}, process="2"))
    peer.channel.close()

    def body(link: TrainerLink) -> None:
        for step in range(2):
            link.report(StepReport(step=step, trained=next_ids(link, step), metrics={}))
            link.report(Published(version=step + 1))
        finish(link, live.config, 2)

    live.work(worker_id="good")
    await live.trainer(body)
    await live.end()
    report = audit(run_paths(live.config).ledger)
    assert report.ok, report.table()
    assert report.steps == 2


async def test_invalid_messages_are_counted_and_logged_once_per_sender(peer: Peer) -> None:
    wrong = [
        *(b"", b"garbage", b"\x80", wire.encode(Ack(digest=b"1")), wire.encode({"type": "Result"})),
        *(b"\x81\xa1a" * 50_000, b"\x82\xa4type\xa6Finish\xa6reason\xa1\xff"),
        *(
            wire.encode(m)
            for m in (
                EvalRequest(eval_id=2**64 - 1),
                EvalRequest(eval_id=-1),
                Checkpointed(step=2**63, path=""),
            )
        ),
        *(
            wire.encode(m)
            for m in (
                BatchRequest(step=0, rank=0, world_size=0),
                WorkerState(worker_id="w", capacity=-1, held=[], split_metrics={}, process=""),
            )
        ),
    ]
    with capture_logs() as logs:
        for frame in wrong:
            peer.say(frame)
        await peer.rejected(len(wrong))
    assert peer.pipe.machine.requests.rejections.total() == len(wrong)
    assert [log["event"] for log in logs].count("message rejected") == 1


async def test_trainer_requests_without_a_ticket_change_nothing(peer: Peer) -> None:
    stray = [
        Published(version=0),
        Checkpointed(step=0, path=""),
        EvalRequest(eval_id=0),
        Finish(reason="x"),
        StepReport(step=0, trained=[], metrics={}),
    ]
    for request in (
        *stray,
        BatchRequest(step=0, rank=0, world_size=1),
        TrainerStart(step=0, world_size=1, ticket=1 << 30),
    ):
        peer.say(request)
    await peer.rejected(6)
    assert peer.pipe.machine.requests.finish is None
    assert not peer.pipe.machine.evals.runs


async def test_result_with_the_lease_of_another_group_leaves_the_lease(peer: Peer) -> None:
    """Otherwise no worker would have the lease, and its group would never complete."""
    lease, other = (await peer.leased("bad"))[:2]
    good = episode(other, 0)
    mixed = Episode(
        lease_id=lease.lease_id,
        group_id=other.group_id,
        member=0,
        headers=[],
        failure=Failure(failure_class="boom", detail=""),
    )
    peer.submit([good, mixed], [payload(good.headers[0])])
    await peer.rejected(1)
    assert 0 in peer.pipe.machine.workers.by_id["bad"].leases[lease.lease_id].unfinished


def test_rejections_of_many_senders_take_bounded_memory() -> None:
    rejections = Rejections()
    with capture_logs() as logs:
        for number in range(3 * MAX_SENDERS):
            rejections.record(f"sender {number}", "garbage")
    assert rejections.total() == 3 * MAX_SENDERS
    assert len(rejections) == len(logs) == MAX_SENDERS + 1


@pytest.mark.parametrize("how", ["garbage", "flip", "missing", "header", "range", "too many"])
async def test_invalid_result_is_a_failed_attempt_and_is_acknowledged(peer: Peer, how: str) -> None:
    leases = await peer.leased("bad")
    for lease in leases:
        for member in lease.members:
            made = episode(lease, member)
            sent = payload(made.headers[0])
            if how == "header":
                made = episode(lease, member, reward=1e6)
            if how == "flip":
                made = replace(made, headers=[replace(made.headers[0], digest=b"1")])
            if how == "range":
                made = replace(made, headers=[replace(made.headers[0], turns=-1)])
            if how == "garbage":
                sent = GARBAGE
            result, frames = result_frames("bad", [made], [sent])
            if how == "missing":
                frames = []
            if how == "too many":
                frames.append(b"")
            peer.say(result, *frames)
    await peer.rejected(4)
    await eventually(lambda: peer.acknowledged() == 4)
    with closing(connect(peer.pipe.ledger.path, read_only=True)) as db:
        assert db.execute("SELECT DISTINCT class FROM failures").fetchall() == [("rejected",)]
        assert db.execute("SELECT COUNT(*) FROM failures").fetchone() == (4,)
        assert db.execute("SELECT COUNT(*) FROM trajectories").fetchone() == (0,)


async def test_unreadable_result_is_acknowledged_and_leased_again(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the worker would resend it forever, and its group would never complete."""
    encode, cut = wire.encode, list[str]()

    def cutting(message: Any) -> bytes:
        if isinstance(message, Result) and not cut:
            cut.extend(each.group_id for each in message.episodes)
            return encode(message)[:-9]
        return encode(message)

    monkeypatch.setattr(wire, "encode", cutting)
    monkeypatch.setattr(workers, "LEASE_ARRIVAL_S", 0.2)
    worker = FakeWorker(lambda: peer.pipe.address, worker_id="cutter")
    store = peer.pipe.machine.store
    working = asyncio.create_task(worker.run())
    await peer.rejected(1)
    await eventually(lambda: all(store.groups[name].state == "complete" for name in cut))
    assert cut and not any(store.groups[name].failures for name in cut)
    worker.link.drain()
    await working


async def test_only_the_invalid_episode_of_a_result_is_lost(peer: Peer) -> None:
    (lease, *_) = await peer.leased("bad")
    good, bad = episode(lease, 0), episode(lease, 1)
    peer.submit([bad, good], [GARBAGE, payload(good.headers[0])])
    await peer.rejected(1)
    group = peer.pipe.machine.store.groups[lease.group_id]
    assert list(group.finished) == [0]
    assert [failure[0] for failure in group.failures] == [1]


async def test_invalid_turns_are_not_stored(peer: Peer) -> None:
    (lease, *_) = await peer.leased("bad")
    turn = TurnHeader(member=0, seat="agent", index=0, oldest_version=0)
    for name, payloads in (("bad", [b"turn"]), ("bad", []), ("w", [])):
        turns = [turn] if name == "bad" else []
        peer.say(
            Progress(worker_id=name, lease_id=lease.lease_id, group_id=lease.group_id, turns=turns),
            *payloads,
        )
    await peer.rejected(3)
    assert peer.pipe.machine.store.groups[lease.group_id].turns == {}


async def test_too_many_rejected_results_stop_the_run(start_pipe: StartPipe) -> None:
    """A worker that sends only invalid results stops the run with an error."""
    live = await start_pipe(max_attempts=9, pipe={"max_failed_share": 0.01})
    await live.begin()
    peer = Peer(live.pipe)
    for lease in await peer.leased("bad"):
        made = [episode(lease, member) for member in lease.members]
        peer.say(Result(worker_id="bad", episodes=made))
    await eventually(lambda: live.pipe.machine.error is not None)
    error = str(live.pipe.machine.error)
    assert "max_failed_share" in error and "rejected" in error
    peer.channel.close()


async def test_frame_above_the_limit_disconnects_its_sender(start_pipe: StartPipe) -> None:
    live = await start_pipe(pipe={"max_frame_mb": 1})
    peer = Peer(live.pipe)
    peer.say(Result(worker_id="w", episodes=[]), bytes(2 << 20))
    peer.say(WorkerState(worker_id="w", capacity=0, held=[], split_metrics={}, process="1"))
    await eventually(lambda: peer.messages(Ack))  # over the next connection
    assert live.pipe.machine.requests.rejections.total() == 0
    peer.channel.close()
    await live.begin()
    await live.trainer(lambda link: link.report(Finish(reason="over")))
    await live.end()


async def test_trajectory_above_the_limit_is_a_failed_episode_at_its_worker() -> None:
    """The worker does not send it, so it is not disconnected."""
    worker = FakeWorker(lambda: None)
    worker.link.max_frame_mb = 0
    made = episode(
        Lease(lease_id="l", group_id="g0", split="train", task=tasks(1)[0], members=[0], version=0),
        0,
    )
    worker.link.submit(made, [payload(made.headers[0])])
    (((sent, payloads),)) = worker.link._outbox
    assert sent.failure and sent.failure.failure_class == "too_large"
    assert (sent.headers, payloads) == ([], [])
