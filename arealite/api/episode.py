"""What agents leave behind in an episode: seat, actions, and the record of their turns."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import msgspec

from arealite.api.llm import LLMResponse, SamplingConfig
from arealite.api.observation import ToolCall
from arealite.base.errors import RewardNotFinite


class Action(msgspec.Struct, frozen=True):
    """What an agent decided."""

    text: str
    """The completion, decoded for the environment; never tokenised again."""
    response: LLMResponse | None = None
    """The generation behind it; None when the policy was not asked."""
    calls: tuple[ToolCall, ...] = ()
    """The tools it calls, in order; also those that could not be read."""
    is_last: bool = False
    """The agent has reached its own cap on turns or tokens: it will not act again."""


class Turn(msgspec.Struct):
    """One generation of an agent, and the reward it received."""

    input_ids: list[int]
    response: LLMResponse
    temperature: float
    reward: float = 0.0
    index: int = 0
    """Which of the seat's generations, in the order of their beginnings."""
    is_stored: bool = False
    """The datapipe was told of it, or told it."""


class StoredTurn(msgspec.Struct, frozen=True):
    """A turn as the ledger keeps it while its episode runs. Arrays are raw little-endian bytes."""

    prompt: bytes
    """`digest` of the prompt's token ids: prompts of many turns would add up."""
    temperature: float
    output_ids: bytes
    """int32 [T]: what was sampled so far."""
    logprobs: bytes
    """float32 [T]."""
    versions: bytes
    """int32 [T]."""
    stop_reason: str
    """As in LLMResponse; "" while the generation is not whole."""
    interruptions: int

    def response(self) -> LLMResponse:
        """Return what was sampled, as the client returned it."""
        lists = _list("i", self.output_ids), _list("f", self.logprobs), _list("i", self.versions)
        return LLMResponse(*lists, self.stop_reason, self.interruptions)


class Record(msgspec.Struct):
    """What one agent did in one episode."""

    turns: list[Turn] = []
    partial: dict[int, Turn] = {}
    """By index: what a generation under way had sampled when it was last cut."""
    recorded: tuple[StoredTurn, ...] = ()
    """Generations of an attempt that was cut, to be had again."""
    resumed_tokens: int = 0
    """Taken from `recorded` instead of a server."""
    resumed_diverged: int = 0
    """1: a prompt was another than the recorded one, and the rest of the record was dropped."""
    reward_parts: dict[str, float] = {}
    generations: int = 0
    """Started ones, finished or not."""
    seconds_generating: float = 0.0
    seconds_scoring: float = 0.0
    """Filled by environments that wait for a reward function."""

    def recall(self, input_ids: list[int], sampling: SamplingConfig) -> LLMResponse | None:
        """Return what is recorded of the next generation, whole or to be continued.

        Where it is of another prompt or temperature, or as long as a generation may be and not
        whole, the rest of the record is dropped.
        """
        if self.generations >= len(self.recorded):
            return None
        stored = self.recorded[self.generations]
        response, same = stored.response(), (digest(input_ids), sampling.temperature)
        is_open = bool(stored.stop_reason) or len(response.output_ids) < sampling.max_new_tokens
        if (stored.prompt, stored.temperature) != same or not is_open:
            self.recorded, self.resumed_diverged = (), 1
            return None
        self.resumed_tokens += len(response.output_ids)
        return response


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


def digest(input_ids: Sequence[int]) -> bytes:
    """Return 16 bytes that no other prompt has."""
    return hashlib.blake2b(array("i", input_ids).tobytes(), digest_size=16).digest()


def encode_turn(turn: Turn) -> bytes:
    """Pack a turn, whole or so far, into one payload frame."""
    response = turn.response
    lists = zip("ifi", (response.output_ids, response.logprobs, response.versions), strict=True)
    ids, logprobs, versions = (array(kind, each).tobytes() for kind, each in lists)
    sampled = (digest(turn.input_ids), turn.temperature, ids, logprobs, versions)
    return msgspec.msgpack.encode(
        StoredTurn(*sampled, response.stop_reason, response.interruptions)
    )


decode_turn = msgspec.msgpack.Decoder(StoredTurn).decode


def _list(kind: str, raw: bytes) -> list[Any]:
    return array(kind, raw).tolist()


def finite(value: float, parts: dict[str, float]) -> tuple[float, dict[str, float]]:
    """Return a reward and its parts as floats.

    Raises:
        RewardNotFinite: one of them, or their sum, is not a finite number.
    """
    value, parts = float(value), {name: float(part) for name, part in parts.items()}
    if not isfinite(sum(parts.values(), value)):
        raise RewardNotFinite(f"reward and parts must be finite, got {value}, {parts}")
    return value, parts
