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
    digest: bytes = b""
    """`Payload.digest` of the payload; b"" if the worker computed none."""
    prompt: bytes = b""
    """Digest of the first turn's prompt (`TurnNode.prompt_digest`); b"": an older version."""
    prompt_tokens: Count = 0
    """Length of that prompt. The trainer computes equal prompts of a group once."""
    computed_tokens: Count = 0
    """Tokens of all turns; shared tokens count once. 0: an older version recorded none."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens, prompts included."""
        return sum(self.segment_lengths)


class TurnNode(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A turn of a trajectory, as a node of a tree: what follows the tokens that it shares.

    The worker makes it, messages carry it, and the ledger stores it. The digest of the prompt is
    made when the request is sent. Equal digests show that the trained tokens are these.
    N = sampled tokens; arrays are raw little-endian bytes.
    """

    parent: Annotated[int, msgspec.Meta(ge=-1)]
    """Index of the earlier turn whose first `shared` tokens this turn begins with; -1: the
    trajectory's prompt."""
    shared: Count
    """Number of first tokens that are those of `parent`."""
    added: bytes
    """int32: the tokens of the prompt after the shared ones."""
    ids: bytes
    """int32 [N]: the sampled tokens."""
    logprobs: bytes
    """float32 [N]: log-probability at sampling time, at the sampling temperature."""
    versions: bytes
    """int32 [N]: policy version that sampled the token."""
    reward: float
    temperature: float
    """The sampling temperature."""
    reused: Count
    """Tokens of the prompt that earlier turns had; the rest is new."""
    reason: Annotated[str, msgspec.Meta(max_length=16)]
    """Why a branch begins: "" extends `parent`; see `Origin.reason`; "forked": another turn extends
    the same turn."""
    prompt_digest: bytes
    """Digest of the whole prompt, int32; b"": an older AReaLite made none."""
    answer_digest: bytes
    """Digest of `ids`, `logprobs`, `versions` and the values of `extras`, in the order of names."""
    next_state: str = ""
    """Text of the observation after the answer. Filled by ObservingCollector; "": unknown."""
    routing: bytes = b""
    """uint8, or uint16 from 256 experts on, [tokens, layers, experts per token]: the experts that
    the server chose, from token `routing_start` to the last but one; b"": not recorded."""
    routing_start: Count = 0
    extras: dict[str, bytes] = {}
    """Further values for each sampled token, by name: N items of equal size.

    `top_ids` and `top_logprobs`: as in `LLMResponse`. `truncated`, uint8: 1 where top_p, top_k,
    min_p or min_new_tokens limited the tokens to a set, which is the tokens in `top_ids` if their
    probabilities add up to 1. With these, `logprobs` is the log-probability in that set."""


class PlacedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn in a segment."""

    start: int
    """Position of its first sampled token: the length of its prompt."""
    length: int
    """Number of sampled tokens."""
    node: TurnNode


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A token sequence in which each turn extends the turn before, for the trainer and for readers.

    Arrays are raw little-endian bytes. It is made from a tree of turns (`TrajectoryTree.segments`).
    """

    tokens: bytes
    """int32 [T]: prompt, sampled and observed tokens, exactly as sent and sampled."""
    loss_mask: bytes
    """uint8 [T]: 1 where a turn of this segment sampled the token."""
    logprobs: bytes
    """float32 [T]: log-probability at sampling time, at the sampling temperature; 0 where
    loss_mask is 0."""
    versions: bytes
    """int32 [T]: policy version that sampled the token; -1 where loss_mask is 0."""
    rewards: bytes
    """float32 [T]: each turn's reward at its last token, else 0."""
    temperature: float
    """The sampling temperature; the trainer divides logits by it."""
    turns: list[PlacedTurn] = []
    """The turns whose sampled tokens are trained here, in order."""
    routing: bytes = b""
    """As in `TurnNode.routing`, for all T tokens: all bits are set where nothing is recorded."""


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
