"""The payload of a trajectory: its prompt, then its segments without common tokens.

A payload begins with a *prompt block*: PROMPT, the size of the prompt in bytes, and the tokens of
the prompt, which precede the first sampled token. The first segment leaves these tokens out. Each
other segment leaves out the tokens that it has in common with the segment before it. Equal prompts
have equal blocks. The ledger and the messages leave out a repeated block.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from arealite.api.trajectory import Segment

MOST_TOKENS = 1 << 24
"""Maximum tokens of an unpacked payload. A small message therefore cannot fill the memory."""
MOST_BYTES = 1 << 30
"""Maximum bytes of the prompts that are restored in a message, for the same reason."""
PROMPT = b"\xc1"
"""First byte of a prompt block; no msgpack message begins with it. The size follows: uint32,
little-endian."""
REPEATED = b"\xc0"
"""First byte of a frame whose prompt block is that of the last payload with one."""
HEADER_BYTES = 5
"""Bytes of a prompt block before its tokens."""
_encode: Callable[[list[Segment]], bytes] = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Segment]).decode


def encode_segments(segments: list[Segment]) -> bytes:
    """Pack a trajectory's segments into one payload."""
    prompt = b""
    if segments:
        prompt_length = max(0, segments[0].loss_mask.find(1))
        prompt = segments[0].tokens[: 4 * prompt_length]
    prompt_block = PROMPT + len(prompt).to_bytes(4, "little") + prompt
    shortened_segments = list[Segment]()
    tokens_before = prompt
    for segment in segments:
        shortened_segments.append(_without_common(tokens_before, segment))
        tokens_before = segment.tokens
    return prompt_block + _encode(shortened_segments)


def split_prompt(payload: bytes) -> tuple[bytes, bytes]:
    """Return (prompt block, packed segments).

    The block is b"" in payloads of AReaLite 0.2 and older.
    """
    if payload[:1] != PROMPT:
        return b"", payload
    prompt_bytes = int.from_bytes(payload[1:HEADER_BYTES], "little")
    end = HEADER_BYTES + prompt_bytes
    return payload[:end], payload[end:]


def decode_segments(payload: bytes) -> list[Segment]:
    """Unpack a payload of any version.

    Raises:
        msgspec.MsgspecError: The bytes are no payload.
    """
    prompt_block, packed_segments = split_prompt(payload)
    segments = list[Segment]()
    tokens_before = prompt_block[HEADER_BYTES:]
    num_tokens = 0
    for shortened in _decode(packed_segments):
        num_common = shortened.common
        max_common = min(len(tokens_before) // 4, MOST_TOKENS - num_tokens)
        if num_common > max_common:
            raise msgspec.ValidationError(
                f"a segment leaves out {num_common} tokens, at most {max_common}"
            )
        segment = _with_common(tokens_before, shortened)
        segments.append(segment)
        tokens_before = segment.tokens
        num_tokens += len(segment.loss_mask)
    return segments


def drop_repeated_prompts(payloads: Sequence[bytes]) -> list[bytes]:
    """Return payloads without each prompt block that equals the block before it."""
    frames = list[bytes]()
    last_block = b""
    for payload in payloads:
        block, packed_segments = split_prompt(payload)
        is_repeated = block != b"" and block == last_block
        frames.append(REPEATED + packed_segments if is_repeated else payload)
        last_block = block or last_block
    return frames


def restore_prompts(frames: Iterable[bytes]) -> list[bytes]:
    """Return the payloads from which `drop_repeated_prompts` made `frames`.

    Beyond MOST_BYTES, frames stay as they are, and are no payloads.
    """
    payloads = list[bytes]()
    last_block = b""
    bytes_left = MOST_BYTES
    for frame in frames:
        payload = frame
        if frame[:1] == REPEATED and bytes_left > 0:
            payload = last_block + frame[1:]
            bytes_left -= len(last_block)
        block, _ = split_prompt(payload)
        last_block = block or last_block
        payloads.append(payload)
    return payloads


def _without_common(tokens_before: bytes, segment: Segment) -> Segment:
    """Return the segment without the tokens that it has in common with `tokens_before`, up to its
    first sampled token."""
    num_unsampled = (segment.loss_mask + b"\1").index(1)
    num_common = _count_common(tokens_before, segment.tokens, num_unsampled)
    num_bytes = 4 * num_common
    has_rewards = any(segment.rewards[:num_bytes])
    if num_common == 0 or has_rewards:
        return segment
    return msgspec.structs.replace(
        segment,
        tokens=segment.tokens[num_bytes:],
        loss_mask=segment.loss_mask[num_common:],
        logprobs=segment.logprobs[num_bytes:],
        versions=segment.versions[num_bytes:],
        rewards=segment.rewards[num_bytes:],
        common=num_common,
    )


def _with_common(tokens_before: bytes, segment: Segment) -> Segment:
    """Return the segment that `_without_common` shortened."""
    num_bytes = 4 * segment.common
    zeros = bytes(num_bytes)
    no_versions = b"\xff" * num_bytes  # int32: -1
    return msgspec.structs.replace(
        segment,
        tokens=tokens_before[:num_bytes] + segment.tokens,
        loss_mask=bytes(segment.common) + segment.loss_mask,
        logprobs=zeros + segment.logprobs,
        versions=no_versions + segment.versions,
        rewards=zeros + segment.rewards,
        common=0,
    )


def _count_common(tokens: bytes, other_tokens: bytes, limit: int) -> int:
    """Return how many first tokens (int32) are equal, at most `limit`, by binary search."""
    low = 0
    high = min(len(tokens) // 4, limit)
    while low < high:
        middle = (low + high + 1) // 2
        if tokens[: 4 * middle] == other_tokens[: 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low
