"""Trajectories, the unit of training data: the exact tokens of one seat in one episode.

A trajectory has a header and a payload. The datapipe reads only the header; it stores and forwards
the payload as bytes. Shapes: T = tokens of one segment.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
"""A non-negative number in a message, small enough for SQLite to store the sum of millions."""
Ranks = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]


class TrajectoryHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a trajectory, for ledger, batches and metrics. Filled by the collector."""

    trajectory_id: str
    """`<group_id>/<member>/<seat>`: unique in a trial; the key of idempotent inserts."""
    group_id: str
    member: Count
    seat: str
    """Advantages are normalised within (group_id, seat)."""
    task_id: str
    reward: float | None
    """Sum of all rewards of this seat in the episode; None: the episode has no score. It is stored
    and counted like others, but not trained."""
    reward_parts: dict[str, float]
    """Named parts of the reward; {} without parts."""
    segment_lengths: list[Count]
    """T of each segment."""
    trained_tokens: Count
    """Tokens with loss_mask 1, over all segments."""
    oldest_version: Count
    """Smallest policy version of any sampled token."""
    newest_version: Count
    turns: Count
    truncated: bool
    """Whether the last generation stopped at its token limit."""
    interruptions: Count
    """Times that a weight update interrupted a generation (retracted, or aborted and
    resubmitted)."""
    seconds: float
    """Wall time of the episode."""
    waits: dict[str, float]
    """Seconds spent on generation, reward and environment."""
    source: str = ""
    """`Task.source`."""
    payload_sum: Count = 0
    """`payload_checks.payload_sum` of the payload; 0 if the worker computed none."""
    prompt: bytes = b""
    """Digest of the first turn's prompt (`TurnReceipt.prompt`); b"": an older version."""
    prompt_tokens: Count = 0
    """Length of that prompt. The trainer computes equal prompts of a group once."""
    computed_tokens: Count = 0
    """Tokens of all turns; shared tokens count once. 0: an older version recorded none."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens, prompts included."""
        return sum(self.segment_lengths)


class TurnReceipt(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Proof of one turn of a segment, made when its request was sent and its answer arrived."""

    start: Count
    """Position of its first sampled token: the length of its prompt."""
    length: Count
    """Number of sampled tokens."""
    reused: Count
    """Tokens of the prompt that earlier turns had; the rest is new."""
    reason: Annotated[str, msgspec.Meta(max_length=16)]
    """Why a branch began: "" extends the turn before; see `Origin.reason`; "forked": another turn
    extends the same turn."""
    prompt: bytes
    """16-byte BLAKE2b hash of the prompt's ids, as little-endian int32."""
    answer: bytes
    """16-byte BLAKE2b hash of the sampled tokens, then their logprobs, then their versions."""


class Segment(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A token sequence in which each turn extends the turn before. Arrays are raw little-endian
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
    """float32 [T]: the turn's reward at its last sampled token, else 0."""
    temperature: float
    """The sampling temperature; the trainer divides logits by it."""
    next_state: str = ""
    """Text of the observation after the last answer. Filled by ObservingCollector; "": unknown."""
    turns: list[TurnReceipt] = []
    """The turns whose sampled tokens are trained here, in order; []: an older AReaLite."""
    routing: bytes = b""
    """uint8, or uint16 from 256 experts on, [T, layers, experts per token]: the experts that the
    server chose, all bits set where none are recorded; b"" without a record."""
    common: Count = 0
    """Only inside a payload: number of tokens at the start that the five arrays leave out. They are
    those of the prompt or of the segment before, and are not trained here."""


def mean_reward(headers: Iterable[TrajectoryHeader]) -> float | None:
    """Return the mean reward of the trajectories that have a score; None if there are none."""
    rewards = [header.reward for header in headers if header.reward is not None]
    return fmean(rewards) if rewards else None


def means(records: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each name over the records that have it, sorted by name."""
    values_by_name: defaultdict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, value in record.items():
            values_by_name[name].append(value)
    return {name: sum(values) / len(values) for name, values in sorted(values_by_name.items())}
