"""Every message survives a round trip; answers name their request."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from arealite.api.rollout_messages import Ack, Drain, Episode, Lease, Result, ToWorker, WorkerState
from arealite.api.trainer_messages import (
    Batch,
    BatchRequest,
    Checkpointed,
    Done,
    EvalRequest,
    EvalResult,
    Finish,
    Finished,
    Published,
    Refused,
    StepReport,
    ToTrainer,
    TrainerReady,
    TrainerStart,
    Waiting,
)
from arealite.system.links import wire
from tests.system.scenes import header, tasks

text = st.text(max_size=20)
number = st.integers(0, 2**40)
numbers = st.dictionaries(text, st.floats(allow_nan=False), max_size=3)
headers = st.builds(
    lambda group, member, reward: header(group, member, reward=reward),
    text, number, st.floats(allow_nan=False),
)  # fmt: skip
episodes = st.builds(
    Episode,
    lease_id=text,
    group_id=text,
    member=number,
    headers=st.lists(headers, max_size=2),
    failure=st.none(),
)

to_datapipe = st.one_of(
    st.builds(
        WorkerState, worker_id=text, capacity=number, held=st.lists(text), split_metrics=numbers
    ),
    st.builds(Result, worker_id=text, episodes=st.lists(episodes, max_size=3)),
    st.builds(TrainerStart, step=number, world_size=number),
    st.builds(BatchRequest, step=number, rank=number, world_size=st.integers(1, 2**16)),
    st.builds(StepReport, step=number, trained=st.lists(text), metrics=numbers),
    st.builds(Published, version=number),
    st.builds(Checkpointed, step=number, path=text),
    st.builds(EvalRequest, eval_id=number),
    st.builds(Finish, reason=text),
)
indices = st.lists(number, max_size=3)
to_trainer = st.one_of(
    st.builds(TrainerReady, step=number, rolled_back_groups=number),
    st.builds(
        Batch,
        step=number,
        headers=st.lists(headers, max_size=3),
        ranks=indices,
        minibatches=indices,
        mine=indices,
        waits=numbers,
    ),
    st.builds(Finished, reason=text),
    st.builds(EvalResult, eval_id=number, metrics=numbers),
    st.builds(Waiting, request=text, detail=text),
    st.builds(Done, request=text),
    st.builds(Refused, request=text, reason=text),
)
to_worker = st.one_of(
    st.builds(
        Lease,
        lease_id=text,
        group_id=text,
        split=text,
        task=st.just(tasks(1)[0]),
        members=st.lists(number),
        version=number,
    ),
    st.builds(Ack, digest=st.binary(max_size=16)),
    st.builds(Drain, reason=text),
)


@given(to_datapipe)
def test_messages_to_the_datapipe_survive_a_round_trip(message: wire.ToDatapipe) -> None:
    assert wire.decode_to_datapipe(wire.encode(message)) == message


@given(to_trainer)
def test_messages_to_the_trainer_survive_a_round_trip(message: ToTrainer) -> None:
    assert wire.decode_to_trainer(wire.encode(message)) == message


@given(to_worker)
def test_messages_to_a_worker_survive_a_round_trip(message: ToWorker) -> None:
    assert wire.decode_to_worker(wire.encode(message)) == message


def test_message_of_the_other_direction_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        wire.decode_to_worker(wire.encode(Published(version=3)))


@pytest.mark.parametrize("value", [-1, 2**40 + 1, 2**63, 2**64 - 1])
def test_number_that_the_ledger_cannot_store_is_refused(value: int) -> None:
    low = header("g0", 0)
    result = Result(
        worker_id="w",
        episodes=[
            Episode(
                lease_id="l",
                group_id="g0",
                member=0,
                headers=[msgspec.structs.replace(low, turns=value)],
                failure=None,
            )
        ],
    )
    states = [
        WorkerState(worker_id="w", capacity=value, held=[], split_metrics={}, process=""),
        EvalRequest(eval_id=value),
        Checkpointed(step=value, path="/x"),
    ]
    for message in (
        result,
        *states,
        TrainerStart(step=0, world_size=1, ticket=value),
        BatchRequest(step=0, rank=0, world_size=value),
    ):
        with pytest.raises(msgspec.ValidationError):
            wire.decode_to_datapipe(wire.encode(message))


@pytest.mark.parametrize("size", [0, 2**16 + 1])
def test_impossible_world_size_is_refused(size: int) -> None:
    with pytest.raises(msgspec.ValidationError):
        wire.decode_to_datapipe(wire.encode(BatchRequest(step=0, rank=0, world_size=size)))


def test_request_names_are_distinct() -> None:
    requests = [
        Published(version=3),
        StepReport(step=3, trained=[], metrics={}),
        EvalRequest(eval_id=3),
        Finish(reason="x"),
        Published(version=4),
    ]
    assert len({wire.request_name(request) for request in requests}) == 5
    assert wire.request_name(Checkpointed(step=7, path="/x")) == "Checkpointed 7"


async def test_channel_delivers_bursts_in_both_directions() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = wire.open_socket(context, zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    dealer = wire.open_socket(context, zmq.DEALER)
    dealer.connect(f"tcp://127.0.0.1:{port}")
    got: list[bytes] = []
    complete = asyncio.Event()

    def answer(frames: list[bytes]) -> None:
        server.send([frames[0], frames[1]])

    def keep(frames: list[bytes]) -> None:
        got.append(frames[0])
        if len(got) == 1000:
            complete.set()

    server, client = wire.Channel(router, answer), wire.Channel(dealer, keep)
    for index in range(1000):
        client.send([b"%d" % index])
    async with asyncio.timeout(60):
        await complete.wait()
    assert got == [b"%d" % index for index in range(1000)]
    server.close()
    client.close()
    client.close()
    context.term()
