"""From the turns an agent recorded to training segments, with exactly the tokens sent and sampled.

Pure functions; every array is built as bytes, because the trainer is the first to do arithmetic.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence

from arealite.api.episode import Turn
from arealite.api.trajectory import Segment

assert sys.byteorder == "little", "payloads are little-endian"


class _Growing:
    """One segment being put together. Chunks are bytes; all have one entry a token."""

    def __init__(self, temperature: float) -> None:
        self.ids: list[int] = []
        self.temperature = temperature
        self.mask: list[bytes] = []
        self.logprobs: list[bytes] = []
        self.versions: list[bytes] = []
        self.rewards: list[bytes] = []

    def add(self, turn: Turn) -> None:
        """Append what the turn shows beyond the segment's tokens, then what it sampled."""
        response = turn.response
        shown = len(turn.input_ids) - len(self.ids)
        sampled = len(response.output_ids)
        self.ids = turn.input_ids + response.output_ids
        self.mask += (bytes(shown), b"\x01" * sampled)
        self.logprobs += (bytes(4 * shown), array("f", response.logprobs).tobytes())
        self.versions += (b"\xff" * (4 * shown), array("i", response.versions).tobytes())
        if shown + sampled:
            self.rewards += (bytes(4 * (shown + sampled - 1)), struct.pack("<f", turn.reward))

    def finish(self) -> Segment:
        return Segment(
            array("i", self.ids).tobytes(),
            b"".join(self.mask),
            b"".join(self.logprobs),
            b"".join(self.versions),
            b"".join(self.rewards),
            self.temperature,
        )


def make_segments(turns: Sequence[Turn]) -> tuple[list[Segment], list[int]]:
    """Merge turns into segments; return them with their lengths T.

    A turn whose prompt begins with all tokens of the turn before (its prompt and its output)
    extends that segment; any other, and one at another temperature, begins a new one.
    """
    growing: list[_Growing] = []
    for turn in turns:
        last = growing[-1] if growing else None
        if last is None or not _extends(last, turn):
            last = _Growing(turn.temperature)
            growing.append(last)
        last.add(turn)
    return [one.finish() for one in growing], [len(one.ids) for one in growing]


def _extends(segment: _Growing, turn: Turn) -> bool:
    held = segment.ids
    return (
        segment.temperature == turn.temperature
        and len(turn.input_ids) >= len(held)
        and turn.input_ids[: len(held)] == held
    )
