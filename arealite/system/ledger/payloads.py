"""Compares a payload with its header and its receipts: lengths, versions, rewards and hashes.

The datapipe calls `find_mismatch` before it stores a payload, a trainer rank before it trains one,
and the audit for every stored payload. The arrays are numpy views: no data is copied.
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
    first, rest = _decode_reference(stored[1:])
    sql = "SELECT payload FROM main.trajectories WHERE trajectory_id = ?"
    row = db.execute(sql, (first,)).fetchone()
    return split_prompt(row[0])[0] + rest if row and row[0] else b""


def payload_sum(payload: bytes) -> int:
    """Return a checksum of a payload, from 1 to 2**40, in one pass over memory.

    A change of one byte changes it. It does not detect forgeries or swapped 8-byte words.
    """
    words = len(payload) // 8
    total = int(np.add.reduce(np.frombuffer(payload, np.uint64, words)))
    return (total + int.from_bytes(payload[words * 8 :]) + len(payload)) % ((1 << 40) - 87) + 1


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
    if header.payload_sum not in (0, payload_sum(payload)):
        return "garbled"
    try:
        segments = decode_segments(payload)
    except msgspec.MsgspecError as error:
        return f"unreadable: {error}"
    for s in segments:
        size = 4 * len(s.loss_mask)
        lengths = {*map(len, (s.tokens, s.logprobs, s.versions, s.rewards))}
        if not size or lengths != {size} or len(s.routing) % len(s.loss_mask):
            return "arrays of other lengths"
        if s.loss_mask[0]:
            return "a sampled token has no prefix"
        if not min_temperature <= s.temperature < math.inf:
            return "logprobs"
    if not segments or [len(s.loss_mask) for s in segments] != header.segment_lengths:
        return "length"
    receipts = sum([len(s.turns) for s in segments])
    if (flaw := _first_flaw(header, segments, vocab_size)) or not receipts:
        return flaw  # an older AReaLite writes no receipts
    if receipts != header.turns:
        return "receipt: number"
    return next((what for s in segments if (what := _wrong_receipt(s))), "")


def _wrong_receipt(s: Segment) -> str:
    """Return the first difference between a segment and its receipts; "" if they agree.

    They agree if each trained token is an answer's, as it arrived, after the prompt that was sent.
    """
    state = blake2b()
    at = 0
    last = 0
    for turn in s.turns:
        begin = turn.start
        end = turn.start + turn.length
        if not (last <= begin and end <= len(s.loss_mask) and turn.reused <= begin):
            return "receipt: range"
        state.update(s.tokens[4 * at : 4 * begin])
        if state.digest() != turn.prompt:
            return f"receipt: prompt of {begin} tokens"
        answer = [each[4 * begin : 4 * end] for each in (s.tokens, s.logprobs, s.versions)]
        if blake2b(b"".join(answer)).digest() != turn.answer:
            return f"receipt: answer after {begin} tokens"
        if s.loss_mask.count(1, begin, end) != turn.length:
            return "receipt: mask"
        at = begin
        last = end
    return "" if sum([turn.length for turn in s.turns]) == s.loss_mask.count(1) else "receipt: mask"


def _first_flaw(header: TrajectoryHeader, segments: list[Segment], vocab_size: int) -> str:
    """Compare the joined arrays of all segments: one numpy call costs as much as 1,000 tokens."""
    versions = np.frombuffer(b"".join([s.versions for s in segments]), "<i4")
    is_sampled = versions >= 0
    if is_sampled.tobytes() != b"".join([s.loss_mask for s in segments]):
        return "mask"
    tokens = np.frombuffer(b"".join([s.tokens for s in segments]), "<u4")
    if np.maximum.reduce(tokens) >= vocab_size:  # as uint32, negative ids are large too
        return "tokens"
    if not _is_finite(np.frombuffer(b"".join([s.logprobs for s in segments]), "<f4")):
        return "logprobs"
    sampled = np.count_nonzero(is_sampled)
    if sampled != header.trained_tokens or not sampled:
        return "length"
    oldest = np.minimum.reduce(versions.view(np.uint32))  # as uint32, -1 is the largest
    if (oldest, np.maximum.reduce(versions)) != (header.oldest_version, header.newest_version):
        return "versions"
    raw = b"".join([s.rewards for s in segments])
    if raw[:-4] == bytes(len(raw) - 4):  # common case: only the last token has a reward
        raw = raw[-4:]
    rewards = np.frombuffer(raw, "<f4")
    if not _is_finite(rewards):
        return "reward"
    reward = float(np.add.reduce(rewards, dtype=np.float64))
    total = float(np.add.reduce(np.abs(rewards), dtype=np.float64))
    return "" if abs(reward - (header.reward or 0.0)) <= ROUNDING * total else "reward"


def _is_finite(values: np.ndarray) -> bool:
    # The dot product with itself is the fastest test; isfinite decides if it overflows.
    return math.isfinite(values.dot(values)) or bool(np.isfinite(values).all())
