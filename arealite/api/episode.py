"""What agents leave behind in an episode: seat, actions, and the record of their turns."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from arealite.api.llm import LLMResponse, SamplingConfig


class Action(msgspec.Struct, frozen=True):
    """What an agent decided."""

    text: str
    """The completion, decoded for the environment; never tokenised again."""
    response: LLMResponse | None = None
    """The generation behind it; None when the policy was not asked."""


class Turn(msgspec.Struct):
    """One generation of an agent, and the reward it received."""

    input_ids: list[int]
    response: LLMResponse
    temperature: float
    reward: float = 0.0


class Record(msgspec.Struct):
    """What one agent did in one episode."""

    turns: list[Turn] = []
    reward_parts: dict[str, float] = {}
    generations: int = 0
    """Started ones, finished or not."""
    seconds_generating: float = 0.0
    seconds_scoring: float = 0.0
    """Filled by environments that wait for a reward function."""


@dataclass(frozen=True)
class Seat:
    """Which seat of which episode an agent sits in. Filled by the collector."""

    name: str = "agent"
    group_id: str = "group"
    episode_id: str = "episode"
    min_version: int = 0
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    recorded: tuple[StoredTurn, ...] = ()
    """Its generations in an attempt that a worker's death cut, in order."""


class StoredTurn(msgspec.Struct, frozen=True):
    """A turn as the ledger keeps it while its episode runs. Arrays are raw little-endian bytes."""

    input_ids: bytes
    """int32: the prompt, as sent."""
    output_ids: bytes
    """int32 [T]: what was sampled so far."""
    logprobs: bytes
    """float32 [T]."""
    versions: bytes
    """int32 [T]."""
    stop_reason: str
    """As in LLMResponse; "" while the generation is not whole."""
    interruptions: int
