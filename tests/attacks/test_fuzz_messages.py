"""Messages that hypothesis generates from their types, mutated and sent with the secret."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from arealite.api.payloads import to_frames
from arealite.api.rollout_messages import FromWorker, Result, WorkerState
from arealite.api.trainer_messages import FromTrainer
from arealite.system.datapipe.message_checks import DECODE_ERRORS
from arealite.system.links import wire
from tests.attacks.conftest import Live
from tests.attacks.peers import Insider, forged, insider
from tests.e2e.conftest import SLOW_S
from tests.hostile import HOSTILE

pytestmark = [pytest.mark.attacks, pytest.mark.timeout(2 * SLOW_S)]

EXAMPLES = 60
"""Number of examples of each type."""
KINDS = [*get_args(FromWorker), *get_args(FromTrainer)]
EDGES = [-1, 0, 1, 2**31, 1 << 40, (1 << 40) + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]
WORDS = ["", "fuzzer", "agent", "g0", "g1", "g0.1.1", "e0-0", "g0/0/agent", HOSTILE, "x" * 10_000]

numbers = st.integers(0, 9) | st.sampled_from(EDGES)
words = st.sampled_from(WORDS) | st.text(max_size=8)
junk = st.recursive(
    st.none() | st.booleans() | numbers | st.floats() | words | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)


SIMPLE: dict[type, st.SearchStrategy[Any]] = {
    inspect.IntType: numbers,
    inspect.StrType: words,
    inspect.FloatType: st.floats(),
    inspect.BoolType: st.booleans(),
    inspect.NoneType: st.none(),
    inspect.BytesType: st.binary(max_size=40),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Return valid and almost valid values of a field on the wire."""
    match kind:
        case kind if type(kind) in SIMPLE:
            return SIMPLE[type(kind)]
        case inspect.ListType(item_type=item):
            return st.lists(values(item), max_size=3)
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(values(key), values(value), max_size=3)
        case inspect.UnionType(types=types):
            return st.one_of([values(each) for each in types])
        case inspect.StructType():
            return structures(kind)
        case _:
            raise AssertionError(f"no values for {kind}")


def structures(kind: inspect.StructType, *, mutated: bool = False) -> st.SearchStrategy[Any]:
    """Return maps with a structure's fields; `mutated`: fields are missing, odd or unknown."""
    fields = {field.encode_name: values(field.type) for field in kind.fields}
    fixed = {} if kind.tag is None else {kind.tag_field: st.just(kind.tag)}
    if not mutated:
        return st.fixed_dictionaries({**fixed, **fields})
    odd = {name: value | junk for name, value in fields.items()}
    return st.fixed_dictionaries(fixed, optional={**odd, "unknown": junk})


def messages(kind: type) -> st.SearchStrategy[bytes]:
    """Return encoded messages of a type: valid, mutated, truncated or with changed bytes."""
    about = inspect.type_info(kind)
    assert isinstance(about, inspect.StructType)
    whole = (structures(about) | structures(about, mutated=True)).map(msgspec.msgpack.encode)
    return whole | st.builds(damaged, whole, st.integers(0, 2**32))


def damaged(frame: bytes, seed: int) -> bytes:
    rng = random.Random(seed)
    at = rng.randrange(len(frame))
    changed = bytes([frame[at] ^ 1 << rng.randrange(8)])
    return frame[:at] if rng.random() < 0.5 else frame[:at] + changed + frame[at + 1 :]


_, FRAMES = to_frames([forged("g0", 0).payload()])
"""A prompt and its turns."""

payloads = st.lists(
    st.binary(max_size=50) | st.sampled_from(FRAMES) | junk.map(msgspec.msgpack.encode),
    max_size=3,
) | st.just(FRAMES)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_fuzzed_messages_of_each_type_do_not_stop_the_run(live: Live, kind: type) -> None:
    with insider(live, f"fuzzer-{kind.__name__}") as peer:

        @settings(
            max_examples=EXAMPLES, derandomize=True, database=None, deadline=None,
            suppress_health_check=[*HealthCheck],
        )  # fmt: skip
        @given(frame=messages(kind), frames=payloads)
        def send(frame: bytes, frames: list[bytes]) -> None:
            peer.send(frame, *frames)
            give_back(peer, frame)

        send()
        peer.wait_until_handled()
    live.wait_for_steps()
    assert live.pids() == live.roles


def give_back(peer: Insider, frame: bytes) -> None:
    """Send a leave for a worker that a message invented, because it would keep its leases."""
    with suppress(*DECODE_ERRORS):
        message = wire.decode_to_datapipe(frame)
        if isinstance(message, WorkerState) and message.capacity:
            peer.send_message(msgspec.structs.replace(message, capacity=0, held=[]))


def test_results_of_real_leases_are_fuzzed(live: Live) -> None:
    """Ids are valid here, so that the checks after them are reached."""
    about = inspect.type_info(Result)
    assert isinstance(about, inspect.StructType)
    with insider(live, "fuzzer") as peer:

        @settings(
            max_examples=EXAMPLES, derandomize=True, database=None, deadline=None,
            suppress_health_check=[*HealthCheck],
        )  # fmt: skip
        @given(data=st.data(), frames=payloads)
        def send(data: st.DataObject, frames: list[bytes]) -> None:
            lease, member = peer.episode()
            made = forged(lease.group_id, member, version=lease.version, reward=1e6)
            raw = msgspec.to_builtins(made.episode(lease.lease_id))
            field = data.draw(st.sampled_from([*raw["headers"][0], "reward"]))
            raw["headers"][0][field] = data.draw(junk)
            prompts = data.draw(st.just([0]) | st.lists(numbers, max_size=3) | junk)
            frame = msgspec.msgpack.encode(
                {
                    "type": "Result",
                    "worker_id": peer.worker_id,
                    "episodes": [raw],
                    "prompts": prompts,
                }
            )
            peer.send(frame, *frames)
            peer.acknowledged(frame)

        send()
    live.wait_for_steps()
    assert max(live.metrics("reward/max")) <= 1.0
