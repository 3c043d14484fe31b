"""What the trainer knew of each sampled token: its advantage, and how far the trainer's own
log-probability was from the sampler's.

Files beside the ledger, one a step and rank, and not columns of it: they are for looking at, and a
disk that cannot take them must not hold the run up.
Shape letter: N = tokens that the policy sampled in the named trajectories, one after the other.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np


class TokenStats(msgspec.Struct, frozen=True):
    """Of the trajectories that one rank trained at one step. Arrays are raw little-endian bytes;
    not a number: the token was not in the loss, or no pass of the trainer has seen it."""

    trajectory_ids: list[str]
    counts: list[int]
    """Sampled tokens of each trajectory; their sum is N."""
    advantages: bytes
    """float16 [N]"""
    differences: bytes
    """float16 [N]: log-probability by the trainer, before its first update, less the sampler's."""


def write(folder: Path, step: int, rank: int, stats: TokenStats) -> None:
    """Keep a rank's part of a step, in the place of any that was there.

    Raises:
        OSError: it cannot be written; what is there then is not whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _file(folder, step, rank).write_bytes(msgspec.msgpack.encode(stats))


def read(folder: Path, step: int, *, ranks: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return (advantages, differences) by trajectory id, of what there is for a step of so many
    ranks; files of ranks that it did not have are of an earlier attempt."""
    found = dict[str, tuple[np.ndarray, np.ndarray]]()
    for rank in range(ranks):
        with suppress(OSError, msgspec.MsgspecError, ValueError):
            raw = _file(folder, step, rank).read_bytes()
            stats = msgspec.msgpack.decode(raw, type=TokenStats)
            advantages_N = np.frombuffer(stats.advantages, "<f2")
            differences_N = np.frombuffer(stats.differences, "<f2")
            ends = pairwise(np.cumsum([0, *stats.counts]).tolist())
            for name, (begin, end) in zip(stats.trajectory_ids, ends, strict=True):
                found[name] = advantages_N[begin:end], differences_N[begin:end]
    return found


def _file(folder: Path, step: int, rank: int) -> Path:
    return folder / f"{step:06d}-{rank}.msgpack"
