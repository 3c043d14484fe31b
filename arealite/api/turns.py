"""Turns: one generation each. They share the tokens of their prompts, and certify them.

A digest is the 16-byte BLAKE2b hash of little-endian arrays. T is the number of sampled tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from arealite.api.llm import LLMResponse

NOTHING = LLMResponse([], [], [], "")
"""The response of a turn before its first token."""


class Origin(msgspec.Struct, frozen=True):
    """Where the tokens of a prompt come from."""

    taken: int
    """Tokens taken from the conversation's tree."""
    rendered: int
    """Tokens rendered and tokenised anew."""
    reason: str = ""
    """Why a branch began: "" extends the last turn; "first", "edited" (by the client), "rewritten"
    (by the template), "resampled", "tools" (other tools or system prompt)."""


class Turn(msgspec.Struct, eq=False):
    """One generation of an agent, and its reward."""

    added: list[int]
    """Tokens of the prompt, without those of `parent`."""
    response: LLMResponse
    temperature: float
    reward: float = 0.0
    index: int = 0
    """Number of the generation within its seat, by start time, from 0."""
    is_stored: bool = False
    """Whether the datapipe has this turn."""
    origin: Origin | None = None
    parent: Turn | None = None
    """The turn that the prompt extends: the prompt begins with its prompt and its output."""
    prompt: bytes = b""
    """Digest of the prompt when its request was sent; b"": not computed yet."""
    answer: bytes = b""
    """Digest of the response when it arrived."""
    tokens: list[int] = []
    """Prompt and output, until another turn extends them."""
    state: Any = None
    """The digest of `tokens`, to be continued."""

    @property
    def input_ids(self) -> list[int]:
        """The prompt."""
        parts, turn = [self.added], self.parent
        while turn is not None:
            parts += turn.response.output_ids, turn.added
            turn = turn.parent
        return [token for part in reversed(parts) for token in part]

    def extend(self, tips: Iterable[Turn]) -> None:
        """Share the tokens of the longest tip that the prompt extends, and compute its digest."""
        ids, size = self.added, -1
        for tip in tips:
            end = len(tip.tokens)
            if (
                size < end <= len(ids)
                and ids[end - 1 : end] == tip.tokens[-1:]
                and tip.temperature == self.temperature
                and ids[:end] == tip.tokens
            ):
                self.parent, size = tip, end
        self.tokens = ids
        if self.parent is not None:
            self.added = ids[size:]
        self.state = self.parent.state.copy() if self.parent else hashlib.blake2b(digest_size=16)
        self.state.update(array("i", self.added))
        self.prompt = self.state.digest()

    def finish(self) -> None:
        """Add the output to the turn's tokens, and compute the digest of the response."""
        each = arrays(self.response)
        self.state.update(each[0])
        self.tokens = self.tokens + self.response.output_ids
        self.answer = hashlib.blake2b(b"".join(each), digest_size=16).digest()


class StoredTurn(msgspec.Struct, frozen=True):
    """A turn in the ledger, while its episode runs. Arrays are raw little-endian bytes."""

    prompt: bytes
    """Digest of the prompt's token ids, which would take too much space."""
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
    index: int = 0
    """`Turn.index`."""

    def response(self) -> LLMResponse:
        """Return the sampled tokens as a response."""
        ids, versions = array("i", self.output_ids).tolist(), array("i", self.versions).tolist()
        logprobs = array("f", self.logprobs).tolist()
        return LLMResponse(ids, logprobs, versions, self.stop_reason, self.interruptions)


def digest(input_ids: Sequence[int]) -> bytes:
    """Return the digest of a prompt's token ids."""
    return hashlib.blake2b(array("i", input_ids), digest_size=16).digest()


def arrays(response: LLMResponse) -> tuple[bytes, bytes, bytes]:
    """Return the ids, logprobs and versions of a response as bytes."""
    logprobs, versions = array("f", response.logprobs), array("i", response.versions)
    return array("i", response.output_ids).tobytes(), logprobs.tobytes(), versions.tobytes()


def encode_turn(turn: Turn) -> bytes:
    """Pack a turn, finished or not, into one payload frame."""
    response, prompt = turn.response, turn.prompt or digest(turn.input_ids)
    end = response.stop_reason, response.interruptions, turn.index
    stored = StoredTurn(prompt, turn.temperature, *arrays(response), *end)
    return msgspec.msgpack.encode(stored)


decode_turn = msgspec.msgpack.Decoder(StoredTurn).decode
