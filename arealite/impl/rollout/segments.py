"""From the turns an agent recorded to training segments, with exactly the tokens sent and sampled.

Pure functions; every array is built as bytes, because the trainer is the first to do arithmetic.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from arealite.api.episode import Turn
from arealite.api.trajectory import Segment

assert sys.byteorder == "little", "payloads are little-endian"


def make_segments(turns: Sequence[Turn]) -> list[Segment]:
    """Merge turns into segments.

    A turn whose prompt begins with all tokens of the turn before (its prompt and its output)
    extends that segment; any other, and one at another temperature, begins a new one.
    """
    runs: list[list[Turn]] = []
    for turn in turns:
        if runs and _extends(turn, runs[-1][-1]):
            runs[-1].append(turn)
        else:
            runs.append([turn])
    return [_segment(run) for run in runs]


def _extends(turn: Turn, last: Turn) -> bool:
    held = last.input_ids + last.response.output_ids
    return turn.temperature == last.temperature and turn.input_ids[: len(held)] == held


def _segment(turns: list[Turn]) -> Segment:
    """Make one segment of turns that extend each other: the last one holds the tokens of all."""
    ids = turns[-1].input_ids + turns[-1].response.output_ids
    mask = logprobs = versions = b""
    rewards = array("f", bytes(4 * len(ids)))
    for turn in turns:
        response = turn.response
        shown = len(turn.input_ids) - len(mask)
        mask += bytes(shown) + b"\x01" * len(response.output_ids)
        logprobs += bytes(4 * shown) + array("f", response.logprobs).tobytes()
        versions += b"\xff" * (4 * shown) + array("i", response.versions).tobytes()
        rewards[len(mask) - 1] += turn.reward
    tokens = array("i", ids).tobytes()
    return Segment(tokens, mask, logprobs, versions, rewards.tobytes(), turns[-1].temperature)
