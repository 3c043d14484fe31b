"""The payload of a trajectory: its segments in one frame, with common tokens once."""

from collections.abc import Callable

import msgspec

from arealite.api.trajectory import Segment

ARRAYS = "tokens", "loss_mask", "logprobs", "versions", "rewards"
"""The arrays of a segment, in the order of their fields."""
MOST_TOKENS = 1 << 24
"""Most tokens of a payload with common ones: a small frame must not unpack into all memory."""
_encode: Callable[[list[Segment]], bytes] = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Segment]).decode


def encode_segments(segments: list[Segment]) -> bytes:
    """Pack a trajectory's segments into one payload frame, without what they have in common."""
    befores = [b"", *(segment.tokens for segment in segments)]
    return _encode([_without_common(*pair) for pair in zip(befores, segments, strict=False)])


def decode_segments(payload: bytes) -> list[Segment]:
    """Unpack a payload frame of any version.

    Raises:
        msgspec.MsgspecError: The bytes are no payload.
    """
    found, tokens = list[Segment](), b""
    for segment in _decode(payload):
        count, total = segment.common, sum(len(each.loss_mask) for each in found)
        if 4 * count > len(tokens) or total + count > MOST_TOKENS:
            raise msgspec.ValidationError(f"a segment shares {count} tokens, which are not there")
        empty = (tokens[: 4 * count], bytes(count), bytes(4 * count), b"\xff" * 4 * count)
        parts = zip(ARRAYS, (*empty, bytes(4 * count)), strict=True)
        whole = {name: begin + getattr(segment, name) for name, begin in parts} if count else {}
        found.append(msgspec.structs.replace(segment, common=0, **whole))
        tokens = found[-1].tokens
    return found


def _without_common(before: bytes, segment: Segment) -> Segment:
    """Leave out the first tokens that are in `before`, too, and that have no loss."""
    low, high = 0, min(len(before) // 4, (segment.loss_mask + b"\1").index(1))
    while low < high:
        middle = (low + high + 1) // 2
        same = before[: 4 * middle] == segment.tokens[: 4 * middle]
        low, high = (middle, high) if same else (low, middle - 1)
    if not low or any(segment.rewards[: 4 * low]):
        return segment
    parts = zip(ARRAYS, (4, 1, 4, 4, 4), strict=True)
    left = {name: getattr(segment, name)[size * low :] for name, size in parts}
    return msgspec.structs.replace(segment, common=low, **left)
