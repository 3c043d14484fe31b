"""The unit of training data: one seat's view of one episode, with exact tokens.

Split in two, because the datapipe needs only the header: it stores and forwards the payload
without looking inside.
Shape letters: T = tokens of one segment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
"""A number in a message. SQLite can store it, and the sum of millions of them."""
Ranks = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]


class TrajectoryHeader(msgspec.Struct, frozen=True):
    """What the ledger, the batch composer and the metrics need to know. Filled by the collector."""

    trajectory_id: str
    """`<group_id>/<member>/<seat>`: unique in a trial, the key of idempotent inserts."""
    group_id: str
    member: Count
    seat: str
    """Advantages are normalised within (group_id, seat)."""
    task_id: str
    reward: float
    """Sum of all rewards of the episode for this seat."""
    reward_parts: dict[str, float]
    """Named parts of the reward; {} where the environment names none."""
    segment_lengths: list[Count]
    """T of each segment."""
    trained_tokens: Count
    """Tokens with loss_mask 1, over all segments."""
    oldest_version: Count
    """Smallest policy version of any sampled token."""
    newest_version: Count
    turns: Count
    truncated: bool
    """The last generation stopped at its token limit."""
    interruptions: Count
    """How often a weight update cut one of its generations (retracted, or aborted and
    resubmitted)."""
    seconds: float
    """Wall time of the episode."""
    waits: dict[str, float]
    """Where the seconds went: generation, reward, environment."""
    source: str = ""
    """The task's."""
    payload_sum: Count = 0
    """`ledger.payloads.payload_sum` of the payload; 0 if the worker computed none."""

    @property
    def num_tokens(self) -> int:
        """All tokens, prompts included."""
        return sum(self.segment_lengths)


class Segment(msgspec.Struct, frozen=True):
    """One token sequence in which every turn extends the one before. Arrays are raw little-endian
    bytes."""

    tokens: bytes
    """int32 [T]: prompt, sampled and observed tokens, exactly as sent and sampled."""
    loss_mask: bytes
    """uint8 [T]: 1 where the policy sampled the token."""
    logprobs: bytes
    """float32 [T]: log-probability at sampling time, at the sampling temperature; 0 where
    loss_mask is 0."""
    versions: bytes
    """int32 [T]: policy version that sampled the token; -1 where loss_mask is 0."""
    rewards: bytes
    """float32 [T]: reward received at that token (the last of its turn), else 0."""
    temperature: float
    """The sampling temperature; the trainer divides logits by it."""


def means(records: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return each name's mean over the records that have it, as of headers' parts; sorted."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, value in record.items():
            found[name].append(value)
    return {name: sum(values) / len(values) for name, values in sorted(found.items())}


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Segment])


def encode_segments(segments: list[Segment]) -> bytes:
    """Pack a trajectory's segments into one payload frame."""
    return _encoder.encode(segments)


def decode_segments(payload: bytes | memoryview) -> list[Segment]:
    """Unpack a payload frame.

    Raises:
        msgspec.DecodeError: the bytes are not a payload.
    """
    return _decoder.decode(payload)
