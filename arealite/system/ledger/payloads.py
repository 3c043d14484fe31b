"""Compares a payload with its header: computes lengths, versions and rewards from the tokens.

Uses no numpy, because the datapipe runs this code, too.
"""

from __future__ import annotations

import math
from array import array

import msgspec

from arealite.api.trajectory import TrajectoryHeader, decode_segments

TOKEN_BYTES = 17
"""Of a token in a payload: its id, mask, logprob, version and reward."""
ROUNDING = 1e-5
"""Relative tolerance between a sum of float32 rewards and the header's float64 reward."""


def unlike(header: TrajectoryHeader, payload: bytes) -> str:
    """Return the first difference between a payload and its header, in words; "" if they agree."""
    lengths, versions, rewards, sampled = list[int](), set[int](), list[float](), 0
    try:
        for s in decode_segments(payload):
            size, mask, ones = len(s.loss_mask), s.loss_mask, s.loss_mask.count(1)
            if {*map(len, (s.tokens, s.logprobs, s.versions, s.rewards))} != {4 * size}:
                return "arrays of other lengths"
            if ones + mask.count(0) != size:
                return "mask"
            # A number that is not finite has all bits of its exponent.
            high = s.logprobs[3::4]
            suspects = high.count(0x7F) + high.count(0xFF)
            if suspects and not all(map(math.isfinite, array("f", s.logprobs))):
                return "logprobs"
            lengths.append(size)
            sampled += ones
            versions |= set(array("i", s.versions))
            zeros = 4 * size - len(s.rewards.lstrip(b"\0"))
            rewards += filter(None, array("f", s.rewards[zeros - zeros % 4 :]))
    except msgspec.MsgspecError as error:
        return f"unreadable: {error}"
    versions.discard(-1)
    rounding = ROUNDING * sum(map(abs, rewards))
    if lengths != header.segment_lengths or sampled != header.trained_tokens:
        return "length"
    oldest, newest = min(versions, default=-1), max(versions, default=-1)
    if (oldest, newest) != (header.oldest_version, header.newest_version):
        return "versions"
    return "" if abs(sum(rewards) - header.reward) <= rounding < math.inf else "reward"
