"""The payload of a trajectory: its prompt, then its segments, with common tokens once.

A payload begins with a *head*: HEAD, the size of the prompt in bytes, and the prompt, which is the
tokens before the first sampled token. The first segment leaves out the prompt. Each other segment
leaves out the tokens that it has in common with the segment before it. Trajectories of a group have
equal heads if they have equal prompts, so the ledger and a message have such a head once.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from arealite.api.trajectory import Segment

ARRAYS = "tokens", "loss_mask", "logprobs", "versions", "rewards"
"""The arrays of a segment, in the order of their fields."""
MOST_TOKENS = 1 << 24
"""Most tokens of a payload with common ones: a small frame must not unpack into all memory."""
HEAD = b"\xc1"
"""First byte of a head; no other msgpack message begins with it. The size follows, uint32."""
_encode: Callable[[list[Segment]], bytes] = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Segment]).decode


def encode_segments(segments: list[Segment]) -> bytes:
    """Pack a trajectory's segments into one payload."""
    start = 4 * max(0, segments[0].loss_mask.find(1)) if segments else 0
    befores = [segments[0].tokens[:start] if segments else b"", *(each.tokens for each in segments)]
    rest = [_without_common(*pair) for pair in zip(befores, segments, strict=False)]
    return HEAD + start.to_bytes(4, "little") + befores[0] + _encode(rest)


def split_head(payload: bytes) -> tuple[bytes, bytes]:
    """Return the head of a payload, b"" if an older AReaLite made it, and the rest."""
    end = 5 + int.from_bytes(payload[1:5], "little") if payload[:1] == HEAD else 0
    return payload[:end], payload[end:]


def decode_segments(payload: bytes) -> list[Segment]:
    """Unpack a payload of any version.

    Raises:
        msgspec.MsgspecError: The bytes are no payload.
    """
    head, rest = split_head(payload)
    found, tokens = list[Segment](), head[5:]
    for segment in _decode(rest):
        count, total = segment.common, sum(len(each.loss_mask) for each in found)
        if 4 * count > len(tokens) or total + count > MOST_TOKENS:
            raise msgspec.ValidationError(f"a segment shares {count} tokens, which are not there")
        empty = (tokens[: 4 * count], bytes(count), bytes(4 * count), b"\xff" * 4 * count)
        parts = zip(ARRAYS, (*empty, bytes(4 * count)), strict=True)
        whole = {name: begin + getattr(segment, name) for name, begin in parts} if count else {}
        found.append(msgspec.structs.replace(segment, common=0, **whole))
        tokens = found[-1].tokens
    return found


def drop_repeated_heads(payloads: Sequence[bytes]) -> list[bytes]:
    """Return payloads without a head where it equals that of the payload before."""
    heads = [split_head(payload)[0] for payload in payloads]
    pairs = zip(payloads, heads, [b"", *heads], strict=False)
    return [each[len(head) :] if head == before else each for each, head, before in pairs]


def restore_heads(frames: Iterable[bytes]) -> list[bytes]:
    """Return the payloads that `drop_repeated_heads` was given, all with a head or none."""
    found, last = list[bytes](), b""
    for frame in frames:
        head, rest = split_head(frame)
        last = head or last
        found.append(last + rest)
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
