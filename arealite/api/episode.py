"""The data of an agent in an episode: its seat, its actions, and the record of its turns."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite

import msgspec

from arealite.api.llm import LLMResponse, SamplingConfig
from arealite.api.observation import ToolCall
from arealite.base.errors import RewardNotFinite


class Action(msgspec.Struct, frozen=True):
    """The result of `Agent.act`."""

    text: str
    """The decoded completion, for the environment; never tokenised again."""
    response: LLMResponse | None = None
    """The generation with this completion; None without a generation."""
    calls: tuple[ToolCall, ...] = ()
    """Tool calls in their order, malformed ones included."""
    is_last: bool = False
    """Whether the agent has reached its limit of turns or tokens and does not act again."""


class Turn(msgspec.Struct):
    """One generation of an agent, and its reward."""

    input_ids: list[int]
    response: LLMResponse
    temperature: float
    reward: float = 0.0
    index: int = 0
    """Number of the generation within its seat, by start time, from 0."""
    is_stored: bool = False
    """Whether the datapipe has this turn."""


class StoredTurn(msgspec.Struct, frozen=True):
    """A turn in the ledger, while its episode runs. Arrays are raw little-endian bytes; T is the
    number of sampled tokens."""

    prompt: bytes
    """`digest` of the prompt's token ids, which would take too much space."""
    temperature: float
    output_ids: bytes
    """int32 [T]: the sampled tokens so far."""
    logprobs: bytes
    """float32 [T]."""
    versions: bytes
    """int32 [T]."""
    stop_reason: str
    """As in LLMResponse; "" while the generation is not finished."""
    interruptions: int

    def response(self) -> LLMResponse:
        """Return the sampled tokens as a response."""
        ids, versions = array("i", self.output_ids).tolist(), array("i", self.versions).tolist()
        logprobs = array("f", self.logprobs).tolist()
        return LLMResponse(ids, logprobs, versions, self.stop_reason, self.interruptions)


class Record(msgspec.Struct):
    """The turns and counters of one agent in one episode."""

    turns: list[Turn] = []
    partial: dict[int, Turn] = {}
    """Unfinished generations at their last interruption, by index."""
    recorded: tuple[StoredTurn, ...] = ()
    """Generations of an earlier attempt, whose worker crashed; `recall` reuses them."""
    resumed_tokens: int = 0
    """Tokens taken from `recorded` instead of a server."""
    resumed_diverged: int = 0
    """1: a prompt differed from the recorded one, and the rest of the record was dropped."""
    reward_parts: dict[str, float] = {}
    generations: int = 0
    """Number of started generations."""
    seconds_generating: float = 0.0
    seconds_scoring: float = 0.0
    """Filled by environments that wait for a reward function."""

    def recall(self, input_ids: list[int], sampling: SamplingConfig) -> LLMResponse | None:
        """Return the record of the next generation, finished or to be continued; None without one.

        The rest of the record is dropped if prompt or temperature differ, or if the generation is
        unfinished and already has `max_new_tokens` tokens.
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
    """The seat of an agent in an episode. Filled by the collector."""

    name: str = "agent"
    group_id: str = "group"
    episode_id: str = "episode"
    min_version: int = 0
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    recorded: tuple[StoredTurn, ...] = ()
    """The seat's generations in an earlier attempt, whose worker crashed, in order."""


def digest(input_ids: Sequence[int]) -> bytes:
    """Return the 16-byte BLAKE2b hash of a prompt's token ids."""
    return hashlib.blake2b(array("i", input_ids).tobytes(), digest_size=16).digest()


def encode_turn(turn: Turn) -> bytes:
    """Pack a turn, finished or not, into one payload frame."""
    response = turn.response
    lists = zip("ifi", (response.output_ids, response.logprobs, response.versions), strict=True)
    ids, logprobs, versions = (array(kind, each).tobytes() for kind, each in lists)
    sampled = (digest(turn.input_ids), turn.temperature, ids, logprobs, versions)
    stored = StoredTurn(*sampled, response.stop_reason, response.interruptions)
    return msgspec.msgpack.encode(stored)


decode_turn = msgspec.msgpack.Decoder(StoredTurn).decode


def finite(value: float, parts: dict[str, float]) -> tuple[float, dict[str, float]]:
    """Return a reward and its parts as floats.

    Raises:
        RewardNotFinite: a number or the sum is not finite.
    """
    value, parts = float(value), {name: float(part) for name, part in parts.items()}
    if not isfinite(sum(parts.values(), value)):
        raise RewardNotFinite(f"reward and parts must be finite, got {value}, {parts}")
    return value, parts
