"""The payloads of formats 4 and 5: lists of segments, as trees of turns."""

import hashlib
import sqlite3
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from arealite.api.trajectory import TurnNode
from arealite.api.trajectory_tree import TrajectoryTree

VIEW = """
CREATE TEMP VIEW payloads AS
SELECT trajectory_id, X'' AS prompt_tokens, turns_of(trajectory_id, payload, payload_sum) AS turns
FROM main.trajectories"""
UNREADABLE = b"\xc1"
"""Stands for a payload that has its checksum, but cannot be decoded."""
ReadSegments = Callable[[bytes], Sequence["OldSegment"]]


class OldReceipt(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The proof of one turn of a segment."""

    start: int
    length: int
    reused: int
    reason: str
    prompt: bytes
    answer: bytes


class OldSegment(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence of tokens; `Segment` explains its arrays."""

    tokens: bytes
    loss_mask: bytes
    logprobs: bytes
    versions: bytes
    rewards: bytes
    temperature: float
    next_state: str = ""
    turns: list[OldReceipt] = []
    routing: bytes = b""
    common: int = 0
    """Format 5: the number of first tokens that the arrays leave out."""


decode_old = msgspec.msgpack.Decoder(list[OldSegment]).decode


def create_payload_view(db: sqlite3.Connection, read_segments: ReadSegments) -> None:
    """Create the view `payloads` of a ledger whose payloads are segments."""
    turns_of = partial(stored_turns, read_segments=read_segments)
    db.create_function("turns_of", 3, turns_of)
    db.execute(VIEW)


def is_stored_payload(trajectory_id: str, payload: bytes, payload_sum: int) -> bool:
    """Return whether a payload has the checksum that was stored beside it."""
    content = msgspec.msgpack.encode((trajectory_id,)) + payload
    digest = hashlib.sha256(content).digest()
    return int.from_bytes(digest[:8], "little") & ((1 << 62) - 1) == payload_sum


def stored_turns(
    trajectory_id: str, payload: bytes | None, payload_sum: int, read_segments: ReadSegments
) -> bytes | None:
    """Return a stored payload as packed turns; None if it was dropped.

    The result is b"" if the payload was changed, and UNREADABLE if it cannot be read.
    """
    if payload is None:
        return None
    if not isinstance(payload, bytes):  # as a hand may leave it
        return b""
    if not is_stored_payload(trajectory_id, payload, payload_sum):
        return b""
    with suppress(ValueError, sqlite3.Error):  # msgspec's errors are ValueErrors
        return tree_of(read_segments(payload))
    return UNREADABLE


def tree_of(segments: Sequence[OldSegment]) -> bytes:
    """Return segments as packed turns; each segment is a branch of its own.

    Raises:
        ValueError: The arrays of a segment contradict each other.
    """
    nodes = list[TurnNode]()
    for segment in segments:
        nodes += _nodes(segment, first=len(nodes))
    return TrajectoryTree(b"", nodes).encode().turns


def _nodes(segment: OldSegment, *, first: int) -> Iterator[TurnNode]:
    """Yield the turns of a segment; the number of the first one is `first`."""
    num_tokens = len(segment.loss_mask)
    arrays = (segment.tokens, segment.logprobs, segment.versions, segment.rewards)
    if {len(values) for values in arrays} != {4 * num_tokens}:
        raise ValueError("arrays of other lengths")
    receipts = segment.turns or _runs(segment, is_first=first == 0)
    if sum(receipt.length for receipt in receipts) != segment.loss_mask.count(1):
        raise ValueError("receipts that do not fit the mask")
    rewards = array("f", segment.rewards)
    routing_width = len(segment.routing) // max(1, num_tokens)
    end_before = 0
    for number, receipt in enumerate(receipts):
        is_last = number == len(receipts) - 1
        end = receipt.start + receipt.length
        if not end_before <= receipt.start <= end <= num_tokens:
            raise ValueError("receipts that overlap")
        if segment.loss_mask.find(0, receipt.start, end) >= 0:
            raise ValueError("receipts that do not fit the mask")
        yield TurnNode(
            parent=first + number - 1 if number else -1,
            shared=end_before,
            added=segment.tokens[4 * end_before : 4 * receipt.start],
            ids=segment.tokens[4 * receipt.start : 4 * end],
            logprobs=segment.logprobs[4 * receipt.start : 4 * end],
            versions=segment.versions[4 * receipt.start : 4 * end],
            reward=sum(rewards[end_before:end]),
            temperature=segment.temperature,
            reused=receipt.reused,
            reason=receipt.reason if number == 0 else "",
            prompt_digest=receipt.prompt,
            answer_digest=receipt.answer,
            next_state=segment.next_state if is_last else "",
            routing=segment.routing[: (end - 1) * routing_width] if is_last else b"",
        )
        end_before = end
    if end_before != num_tokens:
        raise ValueError("tokens after the last turn")


def _runs(segment: OldSegment, *, is_first: bool) -> list[OldReceipt]:
    """Return a receipt without digests for each run of sampled tokens, and for the rest.

    A run ends at a reward: it belonged to the last token of a turn.
    """
    loss_mask = segment.loss_mask
    rewards = array("f", segment.rewards)
    receipts = list[OldReceipt]()
    end = 0
    while end < len(loss_mask):
        start = loss_mask.find(1, end)
        if start < 0:
            start = len(loss_mask)
        end = start
        while end < len(loss_mask) and loss_mask[end]:
            end += 1
            if rewards[end - 1]:
                break
        receipt = OldReceipt(
            start=start,
            length=end - start,
            reused=0,
            reason="first" if is_first else "rewritten",
            prompt=b"",
            answer=b"",
        )
        receipts.append(receipt)
    return receipts
