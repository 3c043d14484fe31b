"""Payloads of formats 4 and 5 become trees with the same segments, turns and digests."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.api.payloads import Payload
from arealite.api.trajectory import Segment
from arealite.api.trajectory_tree import TrajectoryTree
from arealite.ext.older_runs import format_4, format_5
from arealite.ext.older_runs.segments import (
    UNREADABLE,
    OldReceipt,
    OldSegment,
    is_stored_payload,
    stored_turns,
    tree_of,
)
from arealite.system.ledger.payload_checks import find_mismatch
from tests.ext.older_runs.ledgers import (
    old_segments,
    payload_sum,
    shortened,
    with_block,
    with_reference,
)
from tests.ext.view.runs import branched_header, branched_session
from tests.payloads import decode_segments

ID = "g0/0/agent"
BRANCHED = decode_segments(branched_session())
HEADER = branched_header(branched_session(), 0)
PROMPT = BRANCHED[0].tokens[:8]
ARRAYS = ("tokens", "loss_mask", "logprobs", "versions", "rewards", "temperature", "routing")

replace = msgspec.structs.replace


def payload_of(segments: Sequence[OldSegment]) -> Payload:
    return Payload(prompt=b"", turns=tree_of(segments))


def arrays(segments: Sequence[Segment | OldSegment]) -> list[tuple[Any, ...]]:
    return [tuple(getattr(segment, name) for name in ARRAYS) for segment in segments]


def view_of(module: Any, payloads: dict[str, bytes]) -> dict[str, bytes | None]:
    """Return the turns that a reader of a ledger with these payloads gets, by trajectory."""
    with closing(sqlite3.connect(":memory:")) as db:
        db.execute(
            "CREATE TABLE trajectories (trajectory_id TEXT, payload BLOB, payload_sum INTEGER)"
        )
        rows = [(name, stored, payload_sum(name, stored)) for name, stored in payloads.items()]
        db.executemany("INSERT INTO trajectories VALUES (?, ?, ?)", rows)
        module.create_view(db)
        return dict(db.execute("SELECT trajectory_id, turns FROM payloads"))


def test_several_segments_with_receipts_become_the_same_segments() -> None:
    old = old_segments(BRANCHED)
    assert len(old) == 2
    made = decode_segments(payload_of(old))
    assert arrays(made) == arrays(BRANCHED)
    for segment, expected in zip(made, BRANCHED, strict=True):
        assert [(turn.start, turn.length) for turn in segment.turns] == [
            (turn.start, turn.length) for turn in expected.turns
        ]
        for turn, other in zip(segment.turns, expected.turns, strict=True):
            assert turn.node.prompt_digest == other.node.prompt_digest
            assert turn.node.answer_digest == other.node.answer_digest
            assert (turn.node.reused, turn.node.reason) == (other.node.reused, other.node.reason)


def test_receipts_are_verified() -> None:
    old = old_segments(BRANCHED)
    assert find_mismatch(HEADER, payload_of(old)) == ""
    assert find_mismatch(replace(HEADER, turns=3), payload_of(old)) == "receipt: number"


def changed_token(position: int) -> Callable[[OldSegment], OldSegment]:
    def change(segment: OldSegment) -> OldSegment:
        tokens = np.frombuffer(segment.tokens, "<i4").copy()
        tokens[position] ^= 1
        return replace(segment, tokens=tokens.tobytes())

    return change


def changed_receipt(**fields: Any) -> Callable[[OldSegment], OldSegment]:
    def change(segment: OldSegment) -> OldSegment:
        first, *others = segment.turns
        return replace(segment, turns=[replace(first, **fields), *others])

    return change


@pytest.mark.parametrize(
    ("change", "mismatch"),
    [
        (changed_token(0), "receipt: prompt of 2 tokens"),
        (changed_token(2), "receipt: answer after 2 tokens"),
        (changed_token(3), "receipt: answer after 2 tokens"),
        (changed_token(4), "receipt: prompt of 5 tokens"),
        (changed_token(-1), "receipt: answer after 8 tokens"),
        (changed_receipt(prompt=bytes(16)), "receipt: prompt of 2 tokens"),
        (changed_receipt(answer=bytes(16)), "receipt: answer after 2 tokens"),
        (changed_receipt(reused=3), "receipt: range"),
    ],
)
def test_wrong_receipt_is_found(change: Callable[[OldSegment], OldSegment], mismatch: str) -> None:
    for number, _ in enumerate(BRANCHED):
        old = old_segments(BRANCHED)
        if len(old[number].turns) != 3:
            continue
        old[number] = change(old[number])
        assert find_mismatch(HEADER, payload_of(old)) == mismatch


@given(st.data())
def test_runs_of_sampled_tokens_become_turns_without_receipts(data: st.DataObject) -> None:
    segments = [draw_segment(data) for _ in range(data.draw(st.integers(1, 4)))]
    payload = payload_of(segments)
    made = decode_segments(payload)
    # A reward of a turn stands at its last token, and the turns have all rewards.
    for segment, expected in zip(made, segments, strict=True):
        without_rewards = {"rewards": b""}
        assert arrays([replace(segment, **without_rewards)]) == arrays(
            [replace(expected, **without_rewards)]
        )
        rewards = np.frombuffer(segment.rewards, "<f4")
        assert rewards.sum() == np.frombuffer(expected.rewards, "<f4").sum()
    turns = TrajectoryTree.decode(payload).turns
    assert {turn.prompt_digest + turn.answer_digest for turn in turns} == {b""}
    assert turns[0].reason == "first"
    begins = [turn.reason for turn in turns if turn.reason]
    assert begins == ["first"] + ["rewritten"] * (len(segments) - 1)


def draw_segment(data: st.DataObject) -> OldSegment:
    length = data.draw(st.integers(1, 12))
    ones = data.draw(st.lists(st.booleans(), min_size=length, max_size=length))
    mask = np.array(ones, np.uint8)
    routing_width = data.draw(st.sampled_from([0, 2])) if length > 1 else 0
    routing = np.arange(routing_width * length, dtype=np.uint8)
    if routing_width:
        routing[-routing_width:] = 255  # the last token is no input
    rewards = data.draw(st.lists(st.integers(0, 3), min_size=length, max_size=length))
    return OldSegment(
        tokens=np.arange(length, dtype="<i4").tobytes(),
        loss_mask=mask.tobytes(),
        logprobs=np.where(mask, -0.5, 0.0).astype("<f4").tobytes(),
        versions=np.where(mask, 3, -1).astype("<i4").tobytes(),
        rewards=np.array(rewards, "<f4").tobytes(),
        temperature=data.draw(st.sampled_from([0.5, 1.0])),
        routing=routing.tobytes(),
    )


def test_next_state_is_that_of_the_last_turn() -> None:
    first, *others = old_segments(BRANCHED)
    segments = [replace(first, next_state="it is over"), *others]
    turns = decode_segments(payload_of(segments))[0].turns
    assert [turn.node.next_state for turn in turns[:-1]] == [""] * (len(turns) - 1)
    assert turns[-1].node.next_state == "it is over"


def test_format_5_restores_common_tokens() -> None:
    old = old_segments(BRANCHED)
    shorter = shortened(old, PROMPT)
    assert [segment.common for segment in shorter] == [2, 2]
    stored = {ID: with_block(PROMPT, old), "g0/1/agent": with_reference(ID, PROMPT, old)}
    turns = view_of(format_5, stored)
    for name in stored:
        assert turns[name] == tree_of(old)
        payload = Payload(prompt=b"", turns=turns[name] or b"")
        assert find_mismatch(HEADER, payload) == ""


def test_format_5_reads_payloads_without_a_block() -> None:
    old = old_segments(BRANCHED)
    assert view_of(format_5, {ID: msgspec.msgpack.encode(old)}) == {ID: tree_of(old)}


def test_format_4_reads_whole_segments() -> None:
    old = old_segments(BRANCHED)
    assert view_of(format_4, {ID: msgspec.msgpack.encode(old)}) == {ID: tree_of(old)}


def test_segment_that_leaves_out_more_than_there_is_cannot_be_read() -> None:
    (first, *others) = shortened(old_segments(BRANCHED), PROMPT)
    too_much = [replace(first, common=3), *others]
    size = len(PROMPT).to_bytes(4, "little")
    stored = b"\xc1" + size + PROMPT + msgspec.msgpack.encode(too_much)
    assert view_of(format_5, {ID: stored}) == {ID: UNREADABLE}


OLD = old_segments(BRANCHED)
BLOCK = with_block(PROMPT, OLD)


@pytest.mark.parametrize("owner", ["g0/9/agent", "", "g0/1/agent"])
def test_reference_to_a_payload_without_the_prompt_cannot_be_read(owner: str) -> None:
    stored = {ID: BLOCK, "g0/1/agent": with_reference(owner, PROMPT, OLD)}
    turns = view_of(format_5, stored)
    assert turns[ID] == tree_of(OLD)
    assert turns["g0/1/agent"] == UNREADABLE


@pytest.mark.parametrize(
    "stored", [b"", b"\xc1", b"\xc0", b"\xc1\xff\xff\xff\xff", b"\x91\x01", b"\x80", BLOCK[:-1]]
)
def test_stored_payload_without_segments_cannot_be_read(stored: bytes) -> None:
    assert view_of(format_5, {ID: stored}) == {ID: UNREADABLE}
    assert view_of(format_4, {ID: stored}) == {ID: UNREADABLE}
    with pytest.raises(msgspec.MsgspecError):
        decode_segments(Payload(prompt=b"", turns=UNREADABLE))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda s: replace(s, tokens=s.tokens[:-4]), "arrays of other lengths"),
        (lambda s: replace(s, rewards=s.rewards + bytes(4)), "arrays of other lengths"),
        (lambda s: replace(s, loss_mask=bytes(len(s.loss_mask))), "receipts that do not fit"),
        (lambda s: replace(s, turns=s.turns[:-1]), "receipts that do not fit"),
        (lambda s: replace(s, turns=[*s.turns[1:], s.turns[0]]), "receipts that overlap"),
    ],
)
def test_segment_that_contradicts_itself_is_refused(
    wrong: Callable[[OldSegment], OldSegment], message: str
) -> None:
    *others, last = old_segments(BRANCHED)
    assert len(last.turns) == 3
    with pytest.raises(ValueError, match=message):
        tree_of([*others, wrong(last)])


def test_receipts_of_other_tokens_than_the_sampled_ones_are_refused() -> None:
    """A receipt must not turn an observed token into a trained one."""
    segment = OldSegment(
        tokens=bytes(16),
        loss_mask=b"\0\1\0\1",
        logprobs=bytes(16),
        versions=bytes(16),
        rewards=bytes(16),
        temperature=1.0,
        turns=[OldReceipt(start=1, length=2, reused=0, reason="first", prompt=b"", answer=b"")],
    )
    with pytest.raises(ValueError, match="receipts that do not fit"):
        tree_of([segment])
    moved = replace(segment.turns[0], start=2)
    with pytest.raises(ValueError, match="receipts that do not fit"):
        tree_of([replace(segment, turns=[moved])])


def test_payload_with_another_checksum_is_empty() -> None:
    stored = msgspec.msgpack.encode(OLD)
    correct = payload_sum(ID, stored)
    assert is_stored_payload(ID, stored, correct)
    read = msgspec.msgpack.Decoder(list[OldSegment]).decode
    assert stored_turns(ID, stored, correct, read) == tree_of(OLD)
    assert stored_turns("g0/1/agent", stored, correct, read) == b""
    assert stored_turns(ID, stored, correct + 1, read) == b""
    assert stored_turns(ID, stored + b"\0", correct, read) == b""
    assert stored_turns(ID, None, correct, read) is None
