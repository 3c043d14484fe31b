"""Format 5, of versions before 0.3: segments leave out the tokens of the segment before.

A payload begins with the prompt's block: PROMPT, its size in bytes, and its tokens. Instead of a
block that another trajectory of the group stores, it begins with REFERENCE.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from functools import partial

import msgspec

from arealite.ext.older_runs.segments import (
    OldSegment,
    create_payload_view,
    decode_old,
    is_stored_payload,
)

PROMPT = b"\xc1"
REFERENCE = b"\xc0"
HEADER_BYTES = 5
"""Bytes of a prompt's block before its tokens."""

_decode_reference = msgspec.msgpack.Decoder(tuple[str, bytes]).decode


def create_view(db: sqlite3.Connection) -> None:
    """Create the view `payloads` of a ledger of format 5 (hook `ledger_format`)."""
    create_payload_view(db, partial(_segments, db))


def _segments(db: sqlite3.Connection, stored: bytes) -> list[OldSegment]:
    """Return the segments of a stored payload.

    Raises:
        ValueError: The payload, or that with its prompt, cannot be read.
    """
    prompt, shortened = _split(db, stored)
    return [*_whole_segments(prompt, shortened)]


def _split(db: sqlite3.Connection, stored: bytes) -> tuple[bytes, list[OldSegment]]:
    """Return (tokens of the prompt, segments as they are stored).

    Raises:
        ValueError: The payload, or that with its prompt, cannot be read.
    """
    if stored[:1] == PROMPT:
        prompt, segments = _split_block(stored)
        return prompt, decode_old(segments)
    if stored[:1] != REFERENCE:
        return b"", decode_old(stored)
    prompt_owner, segments = _decode_reference(stored[1:])
    query = "SELECT payload, payload_sum FROM main.trajectories WHERE trajectory_id = ?"
    payload, payload_sum = db.execute(query, (prompt_owner,)).fetchone() or (b"", 0)
    has_prompt = isinstance(payload, bytes) and payload[:1] == PROMPT
    if not has_prompt or not is_stored_payload(prompt_owner, payload, payload_sum):
        raise ValueError("the payload with the prompt is missing, or was changed")
    prompt, _ = _split_block(payload)
    return prompt, decode_old(segments)


def _split_block(payload: bytes) -> tuple[bytes, bytes]:
    """Return (tokens of the prompt, packed segments)."""
    prompt_bytes = int.from_bytes(payload[1:HEADER_BYTES], "little")
    end = HEADER_BYTES + prompt_bytes
    return payload[HEADER_BYTES:end], payload[end:]


def _whole_segments(prompt: bytes, shortened: Sequence[OldSegment]) -> Iterator[OldSegment]:
    """Yield segments with the tokens that they left out.

    Raises:
        ValueError: A segment leaves out more than there is.
    """
    tokens_before = prompt
    for segment in shortened:
        num_bytes = 4 * segment.common
        if num_bytes > len(tokens_before):
            raise ValueError("a segment leaves out more tokens than there are")
        zeros = bytes(num_bytes)
        whole = msgspec.structs.replace(
            segment,
            tokens=tokens_before[:num_bytes] + segment.tokens,
            loss_mask=bytes(segment.common) + segment.loss_mask,
            logprobs=zeros + segment.logprobs,
            versions=b"\xff" * num_bytes + segment.versions,
            rewards=zeros + segment.rewards,
            common=0,
        )
        yield whole
        tokens_before = whole.tokens
