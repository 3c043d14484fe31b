"""One generation of an agent: a turn, also as it is stored.

A digest is the 16-byte BLAKE2b hash of little-endian arrays. T is the number of sampled tokens.
"""

import struct
from array import array
from collections.abc import Mapping
from functools import partial
from hashlib import blake2b as _blake2b
from typing import Any

import msgspec

from arealite.api.llm import LLMResponse

blake2b = partial(_blake2b, digest_size=16)


def digest(content: bytes) -> bytes:
    """Return the digest of tokens, of a payload or of a message: the checksum of content."""
    return blake2b(content).digest()


def digest_of_answer(
    ids: bytes, logprobs: bytes, versions: bytes, extras: Mapping[str, bytes]
) -> bytes:
    """Return `TurnNode.answer_digest`."""
    extra_values = [extras[name] for name in sorted(extras)]
    return digest(b"".join([ids, logprobs, versions, *extra_values]))


NOTHING = LLMResponse(output_ids=[], logprobs=[], versions=[], stop_reason="")
"""The response of a turn before its first token."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Where the tokens of a prompt come from."""

    reused: int
    """Tokens of the prompt that are those of earlier turns, unchanged."""
    new: int
    """Tokens that were rendered and tokenised for this prompt."""
    reason: str = ""
    """Why a branch began: "" extends the last turn; "first", "edited" (by the client), "rewritten"
    (by the template), "resampled", "tools" (other tools or system prompt)."""


class Turn(msgspec.Struct, eq=False, kw_only=True):
    """One generation of an agent, and its reward. Its prompt is stored as what follows `parent`."""

    response: LLMResponse
    temperature: float
    num_truncated: int = 0
    """Number of the first sampled tokens at which some tokens could not be sampled."""
    reward: float = 0.0
    index: int = 0
    """Number of the generation within its seat, by start time, from 0."""
    is_stored: bool = False
    """Whether the datapipe has this turn."""
    next_state: str = ""
    """Text of the next observation. Filled by ObservingCollector."""
    origin: Origin | None = None
    """None: the agent did not tell."""
    parent: "Turn | None" = None
    """The turn whose prompt and output begin this prompt; the root of the tree if there is none."""
    prompt: bytes = b""
    """Digest of the prompt when its request was sent."""
    start: int = 0
    """Length of the prompt."""
    added: bytes = b""
    """int32: the prompt's tokens after those of `parent`."""
    sampled: tuple[bytes, bytes, bytes] = (b"", b"", b"")
    """Ids (int32), logprobs (float32) and versions (int32) of the finished response."""
    state: Any = None
    """The hash of the prompt, to be continued."""
    json: bytes = b""
    """The prompt in JSON; b"" when a later turn has continued it."""

    @property
    def end(self) -> int:
        """Length of prompt and output."""
        return self.start + len(self.response.output_ids)

    @property
    def num_known_tokens(self) -> int:
        """Number of the prompt's tokens that are tokens of `parent`."""
        return self.start - len(self.added) // 4

    @property
    def raw_prompt(self) -> bytes:
        """The prompt as int32."""
        parts = [self.added]
        turn = self.parent
        while turn is not None:
            parts += turn.sampled[0], turn.added
            turn = turn.parent
        return b"".join(reversed(parts))

    @property
    def extras(self) -> dict[str, bytes]:
        """`TurnNode.extras`."""
        response = self.response
        extras = dict[str, bytes]()
        if response.top_ids:
            extras = {"top_ids": response.top_ids, "top_logprobs": response.top_logprobs}
        num_sampled = len(response.output_ids)
        num_truncated = min(self.num_truncated, num_sampled)
        if num_truncated:
            extras["truncated"] = (b"\x01" * num_truncated).ljust(num_sampled, b"\x00")
        return extras

    @property
    def routing_start(self) -> int:
        """First token in the record of the response; see `LLMRequest.routing_start`."""
        return max(0, self.num_known_tokens - 1)

    @property
    def input_ids(self) -> list[int]:
        """The prompt."""
        return array("i", self.raw_prompt).tolist()


class StoredTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn in the ledger, while its episode runs."""

    prompt: bytes
    """Digest of the prompt's token ids, which would take too much space."""
    temperature: float
    response: LLMResponse
    """The sampled tokens so far; its stop reason is "" while the generation is not finished."""
    index: int
    """`Turn.index`."""

    @property
    def is_finished(self) -> bool:
        """Whether the generation is finished, so that no server has to continue it."""
        return bool(self.response.stop_reason)


def pack(kind: str, values: list[Any]) -> bytes:
    """Return int32 ("i") or float32 ("f") values as bytes; faster than `array`."""
    return struct.pack(f"<{len(values)}{kind}", *values)


def arrays(response: LLMResponse) -> tuple[bytes, bytes, bytes]:
    """Return the ids, logprobs and versions of a response as bytes."""
    ids = pack("i", response.output_ids)
    logprobs = pack("f", response.logprobs)
    versions = pack("i", response.versions)
    return ids, logprobs, versions


def encode_turn(turn: Turn) -> bytes:
    """Pack a turn, finished or not, into one payload frame."""
    stored = StoredTurn(
        prompt=turn.prompt,
        temperature=turn.temperature,
        response=turn.response,
        index=turn.index,
    )
    return msgspec.msgpack.encode(stored)


decode_turn = msgspec.msgpack.Decoder(StoredTurn).decode
