"""The payload of a trajectory: its prompt, then its segments without common tokens.

A payload begins with a *prompt block*: PROMPT, the size of the prompt in bytes, and the tokens of
the prompt, which precede the first sampled token. The first segment leaves these tokens out. Each
other segment leaves out the tokens that it has in common with the segment before it. Equal prompts
have equal blocks. The ledger and the messages leave out a repeated block.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from arealite.api.trajectory import Segment

ARRAYS = "tokens", "loss_mask", "logprobs", "versions", "rewards"
"""The arrays of a segment, in the order of their fields."""
MOST_TOKENS, MOST_BYTES = 1 << 24, 1 << 30
"""Maximum tokens of an unpacked payload, and maximum bytes of the prompts that are restored in a
message. A small message therefore cannot fill the memory."""
PROMPT = b"\xc1"
"""First byte of a prompt block; no msgpack message begins with it. The size follows: uint32,
little-endian."""
REPEATED = b"\xc0"
"""First byte of a frame whose prompt block is that of the last payload with one."""
_encode: Callable[[list[Segment]], bytes] = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Segment]).decode


def encode_segments(segments: list[Segment]) -> bytes:
    """Pack a trajectory's segments into one payload."""
    start = 4 * max(0, segments[0].loss_mask.find(1)) if segments else 0
    befores = [segments[0].tokens[:start] if segments else b"", *(each.tokens for each in segments)]
    rest = [_without_common(*pair) for pair in zip(befores, segments, strict=False)]
    return PROMPT + start.to_bytes(4, "little") + befores[0] + _encode(rest)


def split_prompt(payload: bytes) -> tuple[bytes, bytes]:
    """Return (prompt block, rest). The block is b"" in payloads of AReaLite 0.2 and older."""
    end = 5 + int.from_bytes(payload[1:5], "little") if payload[:1] == PROMPT else 0
    return payload[:end], payload[end:]


def decode_segments(payload: bytes) -> list[Segment]:
    """Unpack a payload of any version.

    Raises:
        msgspec.MsgspecError: The bytes are no payload.
    """
    prompt, rest = split_prompt(payload)
    found = list[Segment]()
    tokens = prompt[5:]
    total = 0
    for segment in _decode(rest):
        count = segment.common
        most = min(len(tokens) // 4, MOST_TOKENS - total)
        if count > most:
            raise msgspec.ValidationError(f"a segment leaves out {count} tokens, at most {most}")
        zeros = bytes(4 * count)
        ones = b"\xff" * 4 * count
        begins = zip(ARRAYS, (tokens[: 4 * count], bytes(count), zeros, ones, zeros), strict=True)
        whole = {name: begin + getattr(segment, name) for name, begin in begins}
        found.append(msgspec.structs.replace(segment, common=0, **whole))
        tokens = found[-1].tokens
        total = total + len(found[-1].loss_mask)
    return found


def drop_repeated_prompts(payloads: Sequence[bytes]) -> list[bytes]:
    """Return payloads without each prompt block that equals the block before it."""
    found = list[bytes]()
    last = b""
    for payload in payloads:
        prompt, rest = split_prompt(payload)
        found.append(REPEATED + rest if prompt and prompt == last else payload)
        last = prompt or last
    return found


def restore_prompts(frames: Iterable[bytes]) -> list[bytes]:
    """Return the payloads from which `drop_repeated_prompts` made `frames`.

    Beyond MOST_BYTES, frames stay as they are, and are no payloads.
    """
    found = list[bytes]()
    last = b""
    left = MOST_BYTES
    for frame in frames:
        if frame[:1] == REPEATED and left > 0:
            frame = last + frame[1:]
            left = left - len(last)
        last = split_prompt(frame)[0] or last
        found.append(frame)
    return found


def _without_common(before: bytes, segment: Segment) -> Segment:
    """Return the segment without the tokens that it has in common with `before`, up to its first
    sampled token."""
    low = 0
    high = min(len(before) // 4, (segment.loss_mask + b"\1").index(1))
    while low < high:
        middle = (low + high + 1) // 2
        same = before[: 4 * middle] == segment.tokens[: 4 * middle]
        low, high = (middle, high) if same else (low, middle - 1)
    if not low or any(segment.rewards[: 4 * low]):
        return segment
    parts = zip(ARRAYS, (4, 1, 4, 4, 4), strict=True)
    left = {name: getattr(segment, name)[size * low :] for name, size in parts}
    return msgspec.structs.replace(segment, common=low, **left)
