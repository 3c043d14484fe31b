"""Payloads keep every token once, and messages keep every prompt once."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.api import trajectory_tree
from arealite.api.payloads import Payload, from_frames, to_frames
from arealite.api.trajectory import TurnNode
from arealite.api.trajectory_tree import TrajectoryTree
from tests.payloads import decode_segments, pack


def ids(*tokens: int) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def turn(parent: int, shared: int, added: bytes, answer: bytes, **fields: Any) -> TurnNode:
    """Make a turn with one value for each token of its answer."""
    length = len(answer) // 4
    values: dict[str, Any] = {
        "logprobs": np.full(length, -0.5, "<f4").tobytes(),
        "versions": np.full(length, 3, "<i4").tobytes(),
        "reward": 0.5,
        "temperature": 1.0,
        "reused": 0,
        "reason": "edited",
        "prompt_digest": b"",
        "answer_digest": b"",
    }
    return TurnNode(parent=parent, shared=shared, added=added, ids=answer, **{**values, **fields})


def session(turns: int) -> TrajectoryTree:
    """Make an episode whose template drops the thoughts of earlier turns: each is a branch."""
    rng = np.random.default_rng(0)
    prompt = ids(*rng.integers(0, 9, 300))
    nodes = [turn(-1, 300, b"", ids(*range(50)), reason="first")]
    for number in range(1, turns):
        length = 300 + 20 * (number - 1)
        spoken = ids(*range(30, 50))
        nodes.append(turn(number - 1, length, spoken, ids(*range(50))))
    return TrajectoryTree(prompt, nodes)


def test_segments_have_the_tokens_of_all_turns_before() -> None:
    tree = TrajectoryTree(
        ids(1, 2),
        [
            turn(-1, 2, b"", ids(3, 4), reason="first", reward=0.25),
            turn(0, 4, ids(5), ids(6), reason="", reward=1.0),
            turn(1, 3, ids(7, 8), ids(9), reason="edited", temperature=0.5),
            turn(0, 4, b"", ids(10), reason="forked"),
        ],
    )
    first, edited, forked = decode_segments(tree.encode())
    assert np.frombuffer(first.tokens, "<i4").tolist() == [1, 2, 3, 4, 5, 6]
    assert [*first.loss_mask] == [0, 0, 1, 1, 0, 1]
    assert np.frombuffer(first.versions, "<i4").tolist() == [-1, -1, 3, 3, -1, 3]
    assert np.frombuffer(first.logprobs, "<f4").tolist() == [0, 0, -0.5, -0.5, 0, -0.5]
    assert np.frombuffer(first.rewards, "<f4").tolist() == [0, 0, 0, 0.25, 0, 1.0]
    assert [(placed.start, placed.length) for placed in first.turns] == [(2, 2), (5, 1)]
    assert np.frombuffer(edited.tokens, "<i4").tolist() == [1, 2, 3, 7, 8, 9]
    assert [*edited.loss_mask] == [0, 0, 0, 0, 0, 1]
    assert (edited.temperature, first.temperature) == (0.5, 1.0)
    assert np.frombuffer(forked.tokens, "<i4").tolist() == [1, 2, 3, 4, 10]
    assert [*forked.loss_mask] == [0, 0, 0, 0, 1]
    assert tree.segment_lengths == [6, 6, 5]


def test_branch_has_the_experts_of_the_turns_before_it() -> None:
    tree = TrajectoryTree(
        ids(1, 2),
        [
            turn(-1, 2, b"", ids(3), reason="first", routing=b"ab", routing_start=0),
            turn(0, 3, ids(4), ids(5), reason="", routing=b"CD", routing_start=2),
            turn(1, 4, b"", ids(6), reason="resampled", routing=b"xy", routing_start=2),
            turn(1, 4, b"", ids(6), reason="resampled"),
        ],
    )
    line, branch, without = tree.segments()
    assert line.routing == b"abCD\xff"
    assert branch.routing == b"abxy\xff"
    assert without.routing == b""


def test_common_tokens_are_in_the_payload_once() -> None:
    tree = session(20)
    payload = tree.encode()
    num_tokens = sum(tree.segment_lengths)
    assert payload.size < 4 * 300 + 12 * 20 * 50 + 4 * 20 * 20 + 20 * 100
    assert payload.size < 17 * num_tokens / 10
    assert TrajectoryTree.decode(payload).segments() == tree.segments()


@given(st.data())
def test_first_tokens_are_those_of_the_path(data: st.DataObject) -> None:
    paths = [[*range(data.draw(st.integers(1, 5)))]]
    nodes = list[TurnNode]()
    for number in range(data.draw(st.integers(1, 8))):
        parent = data.draw(st.integers(-1, number - 1))
        shared = data.draw(st.integers(0, len(paths[parent + 1])))
        added = data.draw(st.lists(st.integers(0, 9), min_size=shared == 0, max_size=3))
        answer = data.draw(st.lists(st.integers(0, 9), max_size=3))
        nodes.append(turn(parent, shared, ids(*added), ids(*answer)))
        paths.append([*paths[parent + 1][:shared], *added, *answer])
    tree = TrajectoryTree.decode(TrajectoryTree(ids(*paths[0]), nodes).encode())
    for index, path in enumerate(paths[1:]):
        assert tree.ends[index] == len(path)
        for stop in range(len(path) + 1):
            assert tree.tokens(index, stop) == ids(*path[:stop])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (turn(-1, 3, b"", b""), "turn 1 shares 3 tokens, at most 2"),
        (turn(0, 1 << 30, b"", b""), "turn 1 shares 1073741824 tokens, at most 3"),
        (turn(1, 0, b"", b""), "turn 1 follows turn 1"),
        (turn(0, 2, b"", b"", reason=""), "turn 1 does not extend turn 0"),
        (turn(-1, 2, b"", b"", reason=""), "turn 1 does not extend turn -1"),
        (turn(0, 3, b"", b"", reason="", temperature=0.5), "turn 1 does not extend turn 0"),
    ],
)
def test_turn_that_follows_what_is_not_there_is_refused(wrong: TurnNode, message: str) -> None:
    first = turn(-1, 2, b"", ids(3), reason="first")
    with pytest.raises(msgspec.ValidationError, match=message):
        decode_segments(pack(ids(1, 2), [first, wrong]))


def test_turn_is_extended_only_once() -> None:
    first = turn(-1, 2, b"", ids(3), reason="first")
    second = turn(0, 3, b"", ids(4), reason="")
    with pytest.raises(msgspec.ValidationError, match="turn 0 is extended twice"):
        decode_segments(pack(ids(1, 2), [first, second, second]))


def test_small_payload_that_would_fill_the_memory_is_refused() -> None:
    first = turn(-1, 1 << 20, b"", ids(1), reason="first")
    branch = turn(0, 1 << 20, b"", ids(1))
    with pytest.raises(msgspec.ValidationError, match="are too large"):
        decode_segments(pack(bytes(4 << 20), [first, *[branch] * 100]))


def test_small_payload_whose_experts_would_fill_the_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trajectory_tree, "MAX_ROUTING_BYTES", 1 << 20)
    branch = turn(-1, 1 << 15, b"", ids(1), routing=b"12345678", routing_start=(1 << 15) - 1)
    with pytest.raises(msgspec.ValidationError, match="are too large"):
        decode_segments(pack(bytes(4 << 15), [branch] * 100))


def test_small_payload_that_would_take_hours_is_refused() -> None:
    """Each of its segments would walk through all turns before it."""
    first = turn(-1, 1, b"", b"")
    chain = [turn(number, 1, b"", b"") for number in range(4000)]
    with pytest.raises(msgspec.ValidationError, match="are too large"):
        decode_segments(pack(bytes(4), [first, *chain]))


def test_turn_without_a_token_and_text_that_is_no_utf8_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="turn 0 has no token"):
        decode_segments(pack(b"", [turn(-1, 0, b"", b"", reward=1.0)]))
    payload = pack(b"1234", [turn(-1, 1, b"", b"", next_state="text")])
    garbled = msgspec.structs.replace(payload, turns=payload.turns.replace(b"text", b"te\xfft"))
    with pytest.raises(msgspec.DecodeError, match=r"(?i)utf-8"):
        decode_segments(garbled)


def test_experts_of_another_width_count_as_not_recorded() -> None:
    first = turn(-1, 2, b"", ids(3), reason="first", routing=b"a", routing_start=1)
    second = turn(0, 3, ids(4), ids(5), reason="", routing=b"CCDD", routing_start=2)
    (segment,) = decode_segments(pack(ids(1, 2), [first, second]))
    assert segment.routing == b"\xff" * 4 + b"CCDD" + b"\xff\xff"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=8))
def test_message_has_each_prompt_once(numbers: list[tuple[int, int]]) -> None:
    sent = [Payload(prompt=b"p" * 4 * prompt, turns=b"t" * number) for prompt, number in numbers]
    indices, frames = to_frames(sent)
    num_prompts = len({payload.prompt for payload in sent})
    assert len(frames) == num_prompts + len(sent)
    assert from_frames(indices, frames) == sent


@pytest.mark.parametrize("indices", [[], [0], [0, 2], [5, 0]])
def test_message_with_another_number_of_frames_is_refused(indices: list[int]) -> None:
    with pytest.raises(msgspec.ValidationError, match="3 frames for"):
        from_frames(indices, [b"prompt", b"turns", b"turns"])


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x90\x90", b"\x91\x91\x00", b"\x81\x00\x00"])
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_segments(Payload(prompt=b"", turns=garbage))
