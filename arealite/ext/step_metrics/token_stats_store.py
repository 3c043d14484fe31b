"""Stores, for each sampled token, its advantage and the difference of trainer and sampler logprob.

One file per step and rank, beside the ledger. The report shows these numbers and training does not
need them, so a failed write must not stop the run.
Shape letters: N = sampled tokens of the listed trajectories, concatenated; n = those of one.
"""

from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np


class TokenStats(msgspec.Struct, frozen=True, kw_only=True):
    """The trajectories that one rank trained at one step. Arrays are raw little-endian bytes.

    NaN: the token had no loss, or the trainer computed no logprob for it.
    """

    trajectory_ids: list[str]
    counts: list[int]
    """Number of sampled tokens of each trajectory; their sum is N."""
    advantages: bytes
    """float16 [N]"""
    differences: bytes
    """float16 [N]: the trainer's logprob before its first update, minus the sampler's."""


def write(
    folder: Path,
    step: int,
    rank: int,
    stats: TokenStats,
) -> None:
    """Write the statistics of one rank and step; replace an existing file.

    Raises:
        OSError: the file cannot be written; it may then be incomplete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _file(folder, step, rank).write_bytes(msgspec.msgpack.encode(stats))


def read(folder: Path, step: int, *, ranks: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Read the statistics of a step; missing or incomplete files are skipped.

    Args:
        folder: The folder of the files.
        step: The step, from 0.
        ranks: World size of that step; files of higher ranks are of an earlier attempt.

    Returns:
        By trajectory id: float16 advantages and differences of its sampled tokens.
    """
    stats_by_id = dict[str, tuple[np.ndarray, np.ndarray]]()
    for rank in range(ranks):
        with suppress(OSError, msgspec.MsgspecError, ValueError):
            encoded = _file(folder, step, rank).read_bytes()
            stats = msgspec.msgpack.decode(encoded, type=TokenStats)
            advantages_N = np.frombuffer(stats.advantages, "<f2")
            differences_N = np.frombuffer(stats.differences, "<f2")
            ends = np.cumsum([0, *stats.counts])
            bounds = pairwise(ends.tolist())
            pairs = zip(stats.trajectory_ids, bounds, strict=True)
            for trajectory_id, (begin, end) in pairs:
                advantages_n = advantages_N[begin:end]
                differences_n = differences_N[begin:end]
                stats_by_id[trajectory_id] = (
                    advantages_n,
                    differences_n,
                )
    return stats_by_id


def _file(folder: Path, step: int, rank: int) -> Path:
    return folder / f"{step:06d}-{rank}.msgpack"
