"""The payload of a trajectory: its tokens as bytes, in a message or in the ledger.

The prompt of the first turn stands beside the turns, because the episodes of a group often begin
with equal prompts: messages and ledger hold an equal prompt once.
"""

from collections.abc import Sequence

import msgspec

from arealite.api.turns import digest

TOKEN_BYTES = 12
"""Bytes of a sampled token: id, logprob and version."""


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a trajectory, as bytes."""

    prompt: bytes
    """int32: the prompt of the first turn."""
    turns: bytes
    """msgpack: list of TurnNode."""

    @property
    def digest(self) -> bytes:
        """Digest of the turns and the prompt."""
        return digest(self.turns + digest(self.prompt))

    @property
    def size(self) -> int:
        """Number of bytes."""
        return len(self.prompt) + len(self.turns)


def to_frames(payloads: Sequence[Payload]) -> tuple[list[int], list[bytes]]:
    """Return payloads as frames of a message: each different prompt once, then the turns.

    Returns:
        For each payload, the index of its prompt; and the frames.
    """
    numbers = dict[bytes, int]()
    prompt_indices = [numbers.setdefault(payload.prompt, len(numbers)) for payload in payloads]
    turn_frames = [payload.turns for payload in payloads]
    return prompt_indices, [*numbers, *turn_frames]


def from_frames(prompt_indices: Sequence[int], frames: Sequence[bytes]) -> list[Payload]:
    """Return the payloads from which `to_frames` made the frames.

    Raises:
        msgspec.ValidationError: The number of frames is wrong.
    """
    num_prompts = max(prompt_indices, default=-1) + 1
    if len(frames) != num_prompts + len(prompt_indices):
        raise msgspec.ValidationError(
            f"{len(frames)} frames for {num_prompts} prompts and {len(prompt_indices)} payloads"
        )
    pairs = zip(prompt_indices, frames[num_prompts:], strict=True)
    return [Payload(prompt=frames[index], turns=turns) for index, turns in pairs]
