"""Compares a payload with its header and its receipts: lengths, versions, rewards and hashes.

The datapipe calls `find_mismatch` before it stores a payload, a trainer rank before it trains one,
and the audit for every stored payload. The arrays are numpy views: no data is copied.
Shape letter: T = tokens of all segments.
"""

import math
import sqlite3

import msgspec
import numpy as np

from arealite.api.payloads import decode_segments, split_prompt
from arealite.api.trajectory import Segment, TrajectoryHeader
from arealite.api.turns import blake2b

REFERENCE = b"\xc0"
"""First byte of a stored payload without its prompt block. The rest is msgpack: the id of a
trajectory of the group with an equal block, and the rest of the payload."""
_decode_reference = msgspec.msgpack.Decoder(tuple[str, bytes]).decode
TOKEN_BYTES = 17
"""Size of a token in a payload: id 4, mask 1, logprob 4, version 4 and reward 4."""
ROUNDING = 1e-5
"""Relative tolerance between a sum of float32 rewards and the header's float64 reward."""
MIN_TEMPERATURE = 1e-6
"""Lowest sampling temperature of trained trajectories: training divides logits by it."""


def whole_payload(db: sqlite3.Connection, stored: bytes) -> bytes:
    """Return a stored payload with its prompt block; b"" if the block is missing."""
    if stored[:1] != REFERENCE:
        return stored
    prompt_owner, unshared = _decode_reference(stored[1:])
    query = "SELECT payload FROM main.trajectories WHERE trajectory_id = ?"
    row = db.execute(query, (prompt_owner,)).fetchone()
    owner_payload = row[0] if row else None
    if not owner_payload:
        return b""
    prompt, _ = split_prompt(owner_payload)
    return prompt + unshared


def payload_sum(payload: bytes) -> int:
    """Return a checksum of a payload, from 1 to 2**40, in one pass over memory.

    A change of one byte changes it. It does not detect forgeries or swapped 8-byte words.
    """
    num_words = len(payload) // 8
    words = np.frombuffer(payload, np.uint64, num_words)
    total = int(np.add.reduce(words))
    total += int.from_bytes(payload[num_words * 8 :])
    total += len(payload)
    return total % ((1 << 40) - 87) + 1


def find_mismatch(
    header: TrajectoryHeader,
    payload: bytes,
    *,
    vocab_size: int = 1 << 31,
    min_temperature: float = 0.0,
) -> str:
    """Return the name of the first difference between a payload and its header; "" if they agree.

    Args:
        header: The trajectory's header.
        payload: Its encoded segments.
        vocab_size: Number of token ids of the model; the default accepts all.
        min_temperature: Lowest accepted sampling temperature.
    """
    _, mismatch = decode_checked(
        header, payload, vocab_size=vocab_size, min_temperature=min_temperature
    )
    return mismatch


def decode_checked(
    header: TrajectoryHeader,
    payload: bytes,
    *,
    vocab_size: int = 1 << 31,
    min_temperature: float = 0.0,
) -> tuple[list[Segment], str]:
    """Return the segments of a payload, and what `find_mismatch` returns for it."""
    if header.payload_sum not in (0, payload_sum(payload)):
        return [], "garbled"
    try:
        segments = decode_segments(payload)
    except msgspec.MsgspecError as error:
        return [], f"unreadable: {error}"
    mismatch = _segments_mismatch(
        header, segments, vocab_size=vocab_size, min_temperature=min_temperature
    )
    return segments, mismatch


def _segments_mismatch(
    header: TrajectoryHeader,
    segments: list[Segment],
    *,
    vocab_size: int,
    min_temperature: float,
) -> str:
    """Return the first difference between decoded segments and the header; "" if they agree."""
    for segment in segments:
        if flaw := _segment_flaw(segment, min_temperature):
            return flaw
    if not segments or [len(s.loss_mask) for s in segments] != header.segment_lengths:
        return "length"
    return (
        _array_flaw(header, segments, vocab_size)
        or _reward_flaw(header, segments)
        or _receipts_flaw(header, segments)
    )


def _segment_flaw(segment: Segment, min_temperature: float) -> str:
    """Return what is wrong with the lengths or the temperature of a segment; "" if nothing is."""
    num_tokens = len(segment.loss_mask)
    arrays = (segment.tokens, segment.logprobs, segment.versions, segment.rewards)
    if not num_tokens or {len(array) for array in arrays} != {4 * num_tokens}:
        return "arrays of other lengths"
    if len(segment.routing) % num_tokens:
        return "arrays of other lengths"
    if segment.loss_mask[0]:
        return "a sampled token has no prefix"
    if not min_temperature <= segment.temperature < math.inf:
        return "logprobs"
    return ""


def _receipts_flaw(header: TrajectoryHeader, segments: list[Segment]) -> str:
    """Return the first difference between the segments and their receipts; "" if they agree."""
    num_receipts = sum([len(segment.turns) for segment in segments])
    if not num_receipts:  # an older AReaLite writes no receipts
        return ""
    if num_receipts != header.turns:
        return "receipt: number"
    for segment in segments:
        if flaw := _receipt_flaw(segment):
            return flaw
    return ""


def _receipt_flaw(segment: Segment) -> str:
    """Return the first difference between a segment and its receipts; "" if they agree.

    They agree if each trained token is an answer's, as it arrived, after the prompt that was sent.
    """
    prompt_hash = blake2b()
    num_hashed = 0
    previous_end = 0
    for turn in segment.turns:
        begin = turn.start
        end = turn.start + turn.length
        is_in_order = previous_end <= begin and end <= len(segment.loss_mask)
        if not is_in_order or turn.reused > begin:
            return "receipt: range"
        prompt_hash.update(segment.tokens[4 * num_hashed : 4 * begin])
        if prompt_hash.digest() != turn.prompt:
            return f"receipt: prompt of {begin} tokens"
        answer_hash = blake2b()
        for array in (segment.tokens, segment.logprobs, segment.versions):
            answer_hash.update(array[4 * begin : 4 * end])
        if answer_hash.digest() != turn.answer:
            return f"receipt: answer after {begin} tokens"
        if segment.loss_mask.count(1, begin, end) != turn.length:
            return "receipt: mask"
        num_hashed = begin
        previous_end = end
    num_sampled = sum([turn.length for turn in segment.turns])
    return "" if num_sampled == segment.loss_mask.count(1) else "receipt: mask"


def _array_flaw(
    header: TrajectoryHeader,
    segments: list[Segment],
    vocab_size: int,
) -> str:
    """Return the first difference between the arrays and the header; "" if they agree.

    The arrays of all segments are joined: one numpy call costs as much as 1,000 tokens.
    """
    versions_T = np.frombuffer(b"".join([s.versions for s in segments]), "<i4")
    is_sampled_T = versions_T >= 0
    if is_sampled_T.tobytes() != b"".join([s.loss_mask for s in segments]):
        return "mask"
    tokens_T = np.frombuffer(b"".join([s.tokens for s in segments]), "<u4")
    if np.maximum.reduce(tokens_T) >= vocab_size:  # as uint32, negative ids are large too
        return "tokens"
    logprobs_T = np.frombuffer(b"".join([s.logprobs for s in segments]), "<f4")
    if not _is_finite(logprobs_T):
        return "logprobs"
    num_sampled = np.count_nonzero(is_sampled_T)
    if num_sampled != header.trained_tokens or not num_sampled:
        return "length"
    oldest = np.minimum.reduce(versions_T.view(np.uint32))  # as uint32, -1 is the largest
    newest = np.maximum.reduce(versions_T)
    if oldest != header.oldest_version or newest != header.newest_version:
        return "versions"
    return ""


def _reward_flaw(header: TrajectoryHeader, segments: list[Segment]) -> str:
    """Return "reward" if the rewards of the tokens do not add up to the header's; else ""."""
    encoded = b"".join([segment.rewards for segment in segments])
    if encoded[:-4] == bytes(len(encoded) - 4):  # common case: only the last token has a reward
        encoded = encoded[-4:]
    rewards_T = np.frombuffer(encoded, "<f4")
    if not _is_finite(rewards_T):
        return "reward"
    total = float(np.add.reduce(rewards_T, dtype=np.float64))
    magnitude = float(np.add.reduce(np.abs(rewards_T), dtype=np.float64))
    difference = abs(total - (header.reward or 0.0))
    return "" if difference <= ROUNDING * magnitude else "reward"


def _is_finite(array: np.ndarray) -> bool:
    # The dot product with itself is the fastest test; isfinite decides if it overflows.
    return math.isfinite(array.dot(array)) or bool(np.isfinite(array).all())
