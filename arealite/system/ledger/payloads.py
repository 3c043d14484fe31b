"""Compares a payload with its header: computes lengths, versions and rewards from the tokens.

The datapipe calls `unlike` for every payload before it is stored, a trainer rank before the payload
is trained, and the audit for every stored payload. Its arrays are numpy views.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from arealite.api.trajectory import Segment, TrajectoryHeader, decode_segments

TOKEN_BYTES = 17
"""Of a token in a payload: its id, mask, logprob, version and reward."""
ROUNDING = 1e-5
"""Relative tolerance between a sum of float32 rewards and the header's float64 reward."""
COLDEST = 1e-6
"""Lowest temperature of a trajectory that is trained: logits are divided by it."""


def payload_sum(payload: bytes) -> int:
    """Return a checksum of a payload, from 1 to 2**40; it costs one pass over memory.

    It changes with any single byte. It detects neither forgeries nor swapped 8-byte words.
    """
    words = len(payload) // 8
    total = int(np.add.reduce(np.frombuffer(payload, np.uint64, words)))
    return (total + int.from_bytes(payload[words * 8 :]) + len(payload)) % ((1 << 40) - 87) + 1


def unlike(
    header: TrajectoryHeader, payload: bytes, *, vocab_size: int = 1 << 31, coldest: float = 0.0
) -> str:
    """Return the first difference between a payload and its header, in words; "" if they agree.

    Args:
        header: The trajectory's header.
        payload: Its encoded segments.
        vocab_size: Number of token ids of the model, if it is known.
        coldest: Lowest temperature that is accepted.
    """
    if header.payload_sum not in (0, payload_sum(payload)):
        return "garbled"
    lengths, sampled, reward, total = list[int](), 0, 0.0, 0.0
    oldest, newest = 1 << 32, -1
    try:
        segments = decode_segments(payload)
    except msgspec.MsgspecError as error:
        return f"unreadable: {error}"
    for segment in segments:
        if flaw := _flaw(segment, vocab_size, coldest):
            return flaw
        versions = np.frombuffer(segment.versions, "<i4")
        rewards = np.frombuffer(segment.rewards, "<f4")
        if np.count_nonzero(rewards.view(np.int32)) <= 1:  # one reward at the end, the common case
            rewards = rewards[-1:] if rewards[-1] else rewards
        reward += float(np.add.reduce(rewards, dtype=np.float64))
        total += float(np.add.reduce(np.abs(rewards), dtype=np.float64))
        lengths.append(len(segment.loss_mask))
        sampled += np.count_nonzero(np.frombuffer(segment.loss_mask, np.uint8))
        newest = max(newest, int(np.maximum.reduce(versions)))
        oldest = min(oldest, int(np.minimum.reduce(versions.view(np.uint32))))  # -1: the largest
    if lengths != header.segment_lengths or sampled != header.trained_tokens or not sampled:
        return "length"
    if (oldest, newest) != (header.oldest_version, header.newest_version):
        return "versions"
    return "" if abs(reward - header.reward) <= ROUNDING * total < math.inf else "reward"


def _flaw(segment: Segment, vocab_size: int, coldest: float) -> str:
    """Return the first error of a segment, whatever its header; "" if it has none."""
    s, size = segment, len(segment.loss_mask)
    if not size or {*map(len, (s.tokens, s.logprobs, s.versions, s.rewards))} != {4 * size}:
        return "arrays of other lengths"
    if (np.frombuffer(s.versions, "<i4") >= 0).tobytes() != s.loss_mask:
        return "mask"
    if s.loss_mask[0]:
        return "a sampled token has no prefix"
    if np.maximum.reduce(np.frombuffer(s.tokens, "<u4")) >= vocab_size:  # negative ids, too
        return "tokens"
    if not (_is_finite(np.frombuffer(s.logprobs, "<f4")) and coldest <= s.temperature < math.inf):
        return "logprobs"
    return "" if _is_finite(np.frombuffer(s.rewards, "<f4")) else "reward"


def _is_finite(values: np.ndarray) -> bool:
    # The dot product of a vector with itself is the fastest test, but large numbers overflow it.
    return math.isfinite(values.dot(values)) or bool(np.isfinite(values).all())
