"""Attempts of a broken worker that has the secret: each is counted, none is trained."""

from __future__ import annotations

import math
import random
import socket
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from arealite.api.payloads import Payload
from arealite.api.rollout_messages import (
    Episode,
    Failure,
    Lease,
    Progress,
    Result,
    TurnHeader,
)
from arealite.api.turns import digest
from arealite.system.links import wire
from tests.attacks.conftest import FRAME_MB, Live
from tests.attacks.peers import MARKER, PATIENCE_MS, Forgery, Insider, forged, insider
from tests.e2e.conftest import SLOW_S
from tests.hostile import HOSTILE
from tests.payloads import result_frames

pytestmark = [pytest.mark.attacks, pytest.mark.timeout(2 * SLOW_S)]

SIZE = len(MARKER)
SAMPLED = SIZE // 2
BEYOND = [2**63, 2**64 - 1, -1, 1 << 41]
"""Numbers out of the range of a Count."""


@pytest.fixture(scope="module")
def worker(live: Live) -> Iterator[Insider]:
    with insider(live, "broken-worker") as peer:
        yield peer


def ints(values: Any) -> bytes:
    return np.asarray(values, "<i4").tobytes()


def floats(*values: float) -> bytes:
    return np.asarray(values, "<f4").tobytes()


def filled(value: float) -> bytes:
    """Return an array with one invalid number at a sampled token."""
    return floats(*[0.0] * (SAMPLED - 1), value)


def swapped(made: Forgery) -> Forgery:
    made.more = [msgspec.structs.replace(made.header)]
    return made


WRONG: dict[str, Callable[[Forgery], Forgery]] = {
    "token below 0": lambda f: f.put(ids=ints([-1] * SAMPLED)),
    "token of no vocabulary": lambda f: f.put(ids=ints([2**31 - 1] * SAMPLED)),
    "token just beyond the vocabulary": lambda f: f.put(ids=ints([10**5] * SAMPLED)),
    "prompt token below 0": lambda f: f.put(prompt=ints([-1] * SAMPLED)),
    "prompt token of no vocabulary": lambda f: f.put(prompt=ints([2**31 - 1] * SAMPLED)),
    "observed token of no vocabulary": lambda f: f.put(
        shared=SAMPLED - 1, added=ints([2**31 - 1])
    ),
    "fewer tokens than logprobs": lambda f: f.put(ids=ints(MARKER[SAMPLED:-1])),
    "tokens of half a number": lambda f: f.put(ids=b"123"),
    "observed tokens of half a number": lambda f: f.put(shared=SAMPLED - 1, added=b"123"),
    "no tokens": lambda f: f.put(prompt=b"", shared=0, ids=b"", logprobs=b"", versions=b""),
    "mask of all": lambda f: f.put(
        prompt=b"",
        shared=0,
        ids=ints(MARKER),
        logprobs=floats(*[-1.0] * SIZE),
        versions=ints([f.header.oldest_version] * SIZE),
    ).say(trained_tokens=SIZE),
    "mask of none": lambda f: f.put(
        added=ints(MARKER[SAMPLED:]), ids=b"", logprobs=b"", versions=b""
    ),
    "another sampled token": lambda f: f.put(
        ids=ints([*MARKER[SAMPLED:], 7]),
        logprobs=floats(*[-1.0] * (SAMPLED + 1)),
        versions=ints([f.header.oldest_version] * (SAMPLED + 1)),
    ),
    "a turn after itself": lambda f: f.put(parent=0),
    "a turn after a later turn": lambda f: f.put(parent=1),
    "a turn after less than none": lambda f: f.put(parent=-2),
    "a turn that extends none": lambda f: f.put(reason=""),
    "a turn that shares more than there is": lambda f: f.put(shared=SIZE),
    "a turn that shares a gigabyte": lambda f: f.put(shared=1 << 30),
    "a turn that shares less than nothing": lambda f: f.put(shared=-1),
    "a reason of many words": lambda f: f.put(reason="because " * 100),
    "versions of no policy": lambda f: f.put(versions=ints([-1] * SAMPLED)),
    "versions of the future": lambda f: f.put(versions=ints([10**6] * SAMPLED)).say(
        newest_version=10**6, oldest_version=10**6
    ),
    "versions unlike the header": lambda f: f.say(newest_version=f.header.newest_version + 1),
    "logprob NaN": lambda f: f.put(logprobs=filled(math.nan)),
    "logprob inf": lambda f: f.put(logprobs=filled(-math.inf)),
    "logprobs missing": lambda f: f.put(logprobs=b""),
    "experts of half a token": lambda f: f.put(routing=bytes(SIZE)),
    "extras of half a token": lambda f: f.put(extras={"more": bytes(SAMPLED + 1)}),
    "digest of another prompt": lambda f: f.put(prompt_digest=bytes(16)),
    "digest of another answer": lambda f: f.put(
        prompt_digest=digest(f.prompt), answer_digest=bytes(16)
    ),
    "reward NaN": lambda f: f.put(reward=math.nan),
    "reward inf": lambda f: f.put(reward=math.inf),
    "reward NaN in the header": lambda f: f.say(reward=math.nan),
    "reward inf on both sides": lambda f: f.put(reward=math.inf).say(reward=math.inf),
    "reward of a million in the header": lambda f: f.say(reward=1e6),
    "reward of a million in the payload": lambda f: f.put(reward=1e6),
    "part of the reward inf": lambda f: f.say(reward_parts={"exact": -math.inf}),
    "seconds NaN": lambda f: f.say(seconds=math.nan),
    "waits inf": lambda f: f.say(waits={"generation": math.inf}),
    "temperature NaN": lambda f: f.put(temperature=math.nan),
    "temperature below 0": lambda f: f.put(temperature=-1.0),
    "temperature 0": lambda f: f.put(temperature=0.0),
    "lengths unlike the header": lambda f: f.say(segment_lengths=[SIZE + 1]),
    "more sampled tokens in the header": lambda f: f.say(trained_tokens=SIZE),
    "no sampled tokens in the header": lambda f: f.say(trained_tokens=0),
    "huge lengths in the header": lambda f: f.say(segment_lengths=[1 << 40]),
    "huge counts in the header": lambda f: f.say(trained_tokens=1 << 40),
    "another group's trajectory": lambda f: f.say(trajectory_id="g0/0/agent"),
    "another member's trajectory": lambda f: f.say(member=f.header.member + 1),
    "a name with control characters": lambda f: f.say(trajectory_id=HOSTILE),
    "garbled since its digest was taken": lambda f: f.say(digest=b"12345"),
    "one seat twice": swapped,
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_invalid_trajectory_of_a_held_lease_is_counted(
    live: Live, worker: Insider, name: str
) -> None:
    lease, member = worker.episode()
    before = live.rejected()
    made = WRONG[name](forged(lease.group_id, member, version=lease.version))
    sent = [made.payload()] * (1 + len(made.more))
    worker.submit([made.episode(lease.lease_id)], *sent)
    live.counts(before, 1)


def garbage(made: Forgery) -> bytes:
    return random.Random(made.header.trajectory_id).randbytes(4096)


def of_turns(made: Forgery, turns: bytes) -> list[Payload]:
    return [Payload(prompt=made.prompt, turns=turns)]


def shares_without_end(made: Forgery) -> list[Payload]:
    """A small payload of 25 million tokens."""
    made.put(prompt=bytes(100_000), shared=25_000)
    return of_turns(made, msgspec.msgpack.encode([made.turn] * 1000))


PAYLOADS: dict[str, Callable[[Forgery], list[Payload]]] = {
    "none": lambda f: [],
    "two": lambda f: [f.payload()] * 2,
    "empty": lambda f: of_turns(f, b""),
    "garbage": lambda f: of_turns(f, garbage(f)),
    "a prompt of garbage": lambda f: [Payload(prompt=garbage(f), turns=f.payload().turns)],
    "no prompt": lambda f: [Payload(prompt=b"", turns=f.payload().turns)],
    "a truncated prompt": lambda f: [Payload(prompt=f.prompt[:-3], turns=f.payload().turns)],
    "a prompt with a tail": lambda f: [Payload(prompt=f.prompt + b"\0", turns=f.payload().turns)],
    "truncated": lambda f: of_turns(f, f.payload().turns[:-3]),
    "with a tail": lambda f: of_turns(f, f.payload().turns + b"\0"),
    "another structure": lambda f: of_turns(f, msgspec.msgpack.encode({"tokens": MARKER})),
    "no turns": lambda f: of_turns(f, msgspec.msgpack.encode([])),
    "nested": lambda f: of_turns(f, b"\x91" * 100_000),
    "promises a gigabyte": lambda f: of_turns(f, b"\xdd\x40\x00\x00\x00"),
    "promises four gigabytes": lambda f: of_turns(f, b"\x91\x9c\xff\x00\xc6\xff\xff\xff\xff"),
    "shares without end": shares_without_end,
    "JSON": lambda f: of_turns(f, msgspec.json.encode([f.turn])),
    "pickle": lambda f: of_turns(f, b"\x80\x04cos\nsystem\n(S'touch owned'\ntR."),
    "a flipped bit": lambda f: of_turns(
        f, bytes([f.payload().turns[0] ^ 16]) + f.payload().turns[1:]
    ),
}


@pytest.mark.parametrize("name", PAYLOADS)
def test_invalid_payload_of_a_held_lease_is_counted(live: Live, worker: Insider, name: str) -> None:
    lease, member = worker.episode()
    before = live.rejected()
    made = forged(lease.group_id, member, version=lease.version)
    sent = PAYLOADS[name](made)
    worker.submit([made.episode(lease.lease_id)], *sent)
    live.counts(before, 1)


@pytest.mark.parametrize(
    "failure", [None, Failure(failure_class="both", detail="a failure and a trajectory")]
)
def test_episode_needs_either_a_trajectory_or_a_failure(
    live: Live, worker: Insider, failure: Failure | None
) -> None:
    lease, member = worker.episode()
    before = live.rejected()
    made = forged(lease.group_id, member, version=lease.version)
    headers, sent = ([made.header], [made.payload()]) if failure else ([], [])
    episode = Episode(
        lease_id=lease.lease_id,
        group_id=lease.group_id,
        member=member,
        headers=headers,
        failure=failure,
    )
    worker.submit([episode], *sent)
    live.counts(before, 1)


@pytest.mark.parametrize("name", ["segment_lengths", "turns", "interruptions", "prompt_tokens"])
@pytest.mark.parametrize("number", BEYOND)
def test_number_out_of_range_is_counted(
    live: Live, worker: Insider, name: str, number: int
) -> None:
    lease, member = worker.episode()
    before = live.rejected()
    made = forged(lease.group_id, member, version=lease.version)
    episodes = [made.episode(lease.lease_id)]
    result, frames = result_frames(worker.worker_id, episodes, [made.payload()])
    raw = msgspec.to_builtins(result)
    raw["episodes"][0]["headers"][0][name] = [number] if name == "segment_lengths" else number
    frame = msgspec.msgpack.encode(raw)
    worker.send(frame, *frames)
    worker.acknowledged(frame)
    live.counts(before, 1)


@pytest.mark.parametrize(
    "prompts", [[], [1], [0, 0], [0, 1], [5], [2**40], [2**64 - 1], [-1], ["0"], None, "0"]
)
def test_payloads_with_wrong_indices_of_prompts_are_counted(
    live: Live, worker: Insider, prompts: object
) -> None:
    lease, member = worker.episode()
    before = live.rejected()
    made = forged(lease.group_id, member, version=lease.version)
    episodes = [made.episode(lease.lease_id)]
    result, frames = result_frames(worker.worker_id, episodes, [made.payload()])
    frame = msgspec.msgpack.encode({**msgspec.to_builtins(result), "prompts": prompts})
    worker.send(frame, *frames)
    worker.acknowledged(frame)
    live.counts(before, 1)


FOREIGN: dict[str, Callable[[Live], tuple[str, str, int]]] = {
    "a lease that is not there": lambda live: ("g0.999.999", f"g{10**9}", 0),
    "a group that was never offered": lambda live: ("g99999999.1.1", "g99999999", 0),
    "a group of no number": lambda live: ("gx.1.1", "gx", 0),
    "a group of a huge number": lambda live: (f"g{10**30}.1.1", f"g{10**30}", 0),
    "an evaluation that is not there": lambda live: ("e0-0.1.99", "x0-0", 0),
    "a name of control characters": lambda live: (HOSTILE, HOSTILE, 0),
    "no name": lambda live: ("", "", 0),
    "SQL": lambda live: ("'; DROP TABLE groups; --", "'; DROP TABLE groups; --", 0),
    "a path": lambda live: ("../../secret", "../../secret", 0),
    "a member that is not there": lambda live: ("g99999999.1.1", "g99999999", 1 << 40),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_result_without_a_lease_is_counted(live: Live, worker: Insider, name: str) -> None:
    before = live.rejected()
    lease_id, group_id, member = FOREIGN[name](live)
    made = forged("g0", member)
    made.ids = (group_id, member)
    made.say(group_id=group_id, trajectory_id=f"{group_id}/{member}/agent")
    worker.submit([made.episode(lease_id)], made.payload())
    live.counts(before, 1)


def test_result_of_another_workers_lease_is_counted(live: Live, worker: Insider) -> None:
    """A valid trajectory for a lease of another worker."""
    with insider(live, "second-worker") as second:
        lease, member = second.episode()
        before = live.rejected()
        made = forged(lease.group_id, member, version=lease.version)
        worker.submit([made.episode(lease.lease_id)], made.payload())
        live.counts(before, 1)


def test_forged_groups_with_a_huge_reward_are_counted(live: Live, worker: Insider) -> None:
    before, last = live.rejected(), live.step()
    made = [forged(f"g{10**8 + n}", n % 4, reward=1e6) for n in range(30)]
    episodes = [each.episode(f"{each.header.group_id}.1.{n}") for n, each in enumerate(made)]
    worker.submit(episodes, *(each.payload() for each in made))
    live.counts(before, 30)
    assert live.step() > last
    assert max(live.metrics("reward/max")) <= 1.0


def turns(group: str, lease_id: str, worker_id: str, number: int = 1) -> Progress:
    headers = [TurnHeader(member=0, seat="agent", index=n, oldest_version=0) for n in range(number)]
    return Progress(worker_id=worker_id, lease_id=lease_id, group_id=group, turns=headers)


@pytest.mark.parametrize("payloads", [[], [b"garbage"], [b"", b""], [b"\x91" * 10_000]])
def test_undecodable_turns_are_counted(live: Live, worker: Insider, payloads: list[bytes]) -> None:
    before = live.rejected()
    worker.send_message(turns("g0", "g0.1.1", worker.worker_id), *payloads)
    worker.wait_until_handled()
    live.counts(before, 1)


RAW: dict[str, list[bytes]] = {
    "nothing": [b""],
    "nil": [b"\xc0"],
    "garbage": [random.Random(2).randbytes(1000)],
    "JSON": [msgspec.json.encode(Result(worker_id="w", episodes=[]))],
    "no type": [msgspec.msgpack.encode({"worker_id": "x"})],
    "an unknown type": [msgspec.msgpack.encode({"type": "Shutdown", "reason": "now"})],
    "a message to workers": [msgspec.msgpack.encode({"type": "Drain", "reason": "now"})],
    "a type of bytes": [msgspec.msgpack.encode({"type": b"Result"})],
    "truncated": [wire.encode(Result(worker_id="w", episodes=[]))[:-4]],
    "with a tail": [wire.encode(Result(worker_id="w", episodes=[])) + b"\xc1"],
    "deep": [b"\x81\xa1a" * 50_000],
    "deep lists": [b"\x91" * 500_000],
    "promises a gigabyte": [b"\xdf\x40\x00\x00\x00"],
    "a key a million times": [b"\xdf\x00\x01\x00\x00" + b"\xa4type\xa6Result" * 65536],
    "a word that is no UTF-8": [msgspec.msgpack.encode({"type": "Finish"})[:-6] + b"\xff" * 6],
    "a worker's state of words": [
        msgspec.msgpack.encode({"type": "WorkerState", "worker_id": 1, "capacity": "many"})
    ],
    "a worker's state with a huge capacity": [
        msgspec.msgpack.encode(
            {
                "type": "WorkerState", "worker_id": "w", "capacity": 2**64 - 1, "held": [],
                "split_metrics": {}, "process": "p",
            }
        )
    ],
    "a thousand frames": [b"x"] * 1000,
}  # fmt: skip


@pytest.mark.parametrize("name", RAW)
def test_bytes_that_are_not_a_message_are_counted(live: Live, worker: Insider, name: str) -> None:
    before = live.rejected()
    worker.send(*RAW[name])
    worker.wait_until_handled()
    live.counts(before, 1)


def test_empty_message_does_not_stop_the_run(live: Live, worker: Insider) -> None:
    worker.send(b"", b"", b"")
    worker.wait_until_handled()
    live.wait_for_steps()


def test_frame_above_the_limit_ends_only_its_connection(live: Live) -> None:
    """The connection is closed before the frame is in memory, and so is every later attempt."""
    peer = Insider(live, "large-worker")
    peer.wait_until_handled()
    peer.socket.get_monitor_socket().close(0)
    peer.socket.disable_monitor()
    monitor = peer.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED, "inproc://disconnections")
    peer.send(bytes((FRAME_MB << 20) + 1000))
    is_cut = monitor.poll(PATIENCE_MS)
    wire.close(peer.socket, linger_ms=0)
    peer.context.term()
    assert is_cut
    live.wait_for_steps()


def test_large_frame_within_the_limit_is_counted(live: Live, worker: Insider) -> None:
    before = live.rejected()
    worker.send(bytes(FRAME_MB << 20))
    worker.wait_until_handled()
    live.counts(before, 1)


def test_flood_of_wrong_messages_is_counted_and_logged_once(live: Live) -> None:
    log = live.paths.logs / "datapipe-0.log"
    with insider(live, "flooding-worker") as peer:
        before, lines = live.rejected(), log.read_text().count("message rejected")
        for _ in range(5000):
            peer.send(b"flood")
        peer.wait_until_handled()
        live.counts(before, 5000)
    assert log.read_text().count("message rejected") == lines + 1


@pytest.mark.parametrize("capacity", [10**6, 1 << 40])
def test_leases_of_a_worker_that_leaves_are_given_to_others(live: Live, capacity: int) -> None:
    with insider(live, "greedy-worker") as peer:
        peer.send_message(peer.state(capacity))
        peer.receive(Lease)
    live.wait_for_steps()


def test_run_continues_if_a_worker_with_leases_is_silent(live: Live) -> None:
    with insider(live, "silent-worker") as peer:
        peer.send_message(peer.state(40))
        peer.receive(Lease)
        live.wait_for_steps(5)


def test_process_with_the_id_of_a_live_worker_stops_no_process(live: Live) -> None:
    victim = f"rollout-0@{socket.gethostname()}"
    with insider(live, victim) as peer:
        for _ in range(3):
            peer.send_message(peer.state(1))
            peer.wait_until_handled()
        live.wait_for_steps()
    live.wait_for_steps(5)
    assert live.pids() == live.roles


def test_hostile_worker_id_and_failure_class_are_treated_as_text(live: Live) -> None:
    """A valid failure whose class has control characters; test_end.py checks all output."""
    with insider(live, HOSTILE) as peer:
        lease, member = peer.episode()
        failure = Failure(failure_class=HOSTILE, detail=HOSTILE)
        episode = Episode(
            lease_id=lease.lease_id,
            group_id=lease.group_id,
            member=member,
            headers=[],
            failure=failure,
        )
        peer.submit([episode])
        before = live.rejected()
        peer.send(b"noise")
        peer.wait_until_handled()
        live.counts(before, 1)
