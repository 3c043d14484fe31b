"""The trajectories of a report: which ones, a table of their headers, and their tokens in chunks.

The table is small and drawn at once; tokens come in chunks of a size that a browser inflates in
milliseconds, when somebody looks. Payloads are read a chunk at a time, however many there are.
Shape letters: T = tokens of a chunk, N = those of them that the policy sampled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from arealite.api.trajectory import TrajectoryHeader, decode_segments
from arealite.base.names import RunPaths
from arealite.system.ledger import token_stats
from arealite.system.ledger.ledger import connect, decode_header, read_payloads

CHUNK_TOKENS = 1 << 16
"""A chunk holds about so many, and at least one trajectory."""
SHOWN = (
    *("member", "seat", "source", "reward", "reward_parts", "turns", "truncated", "interruptions"),
    *("segment_lengths", "num_tokens", "trained_tokens", "oldest_version", "newest_version"),
    "seconds",
)
"""What the table has of headers."""
FIELDS = {
    "tokens": "<i4", "loss_mask": "u1", "logprobs": "<f4", "versions": "<i4", "rewards": "<f4",
}  # fmt: skip
"""A segment's arrays."""


class GroupRow(NamedTuple):
    """A group that has trajectories, as the ledger knows it."""

    group_id: str
    task_id: str
    state: str
    reason: str | None
    step: int | None
    ranks: int
    """That trained its step; 0 where it is not trained."""
    size: int
    """Trajectories."""


class Row(NamedTuple):
    """A trajectory of a report."""

    group: GroupRow
    header: TrajectoryHeader


def choose(ledger: Path, most: int) -> tuple[list[Row], int]:
    """Return at most `most` trajectories, in whole groups evenly over the steps in their order (the
    untrained at the end), and how many there are in all."""
    with closing(connect(ledger, read_only=True)) as db:
        db.execute("BEGIN")  # one moment of a run that goes on
        groups = [GroupRow(*row) for row in db.execute("""
            SELECT group_id, g.task_id, state, reason, g.step, IFNULL(ranks, 0), COUNT(*)
            FROM groups g JOIN trajectories USING (group_id) LEFT JOIN steps s USING (step)
            GROUP BY seq ORDER BY g.step IS NULL, g.step, place, seq""")]  # fmt: skip
        total = sum(group.size for group in groups)
        share, due, rows = min(1.0, most / max(total, 1)), 0.0, list[Row]()
        sql = "SELECT header FROM trajectories WHERE group_id = ? ORDER BY member, seat"
        for group in groups:
            due += group.size * share
            if due > group.size - 1e-6:
                due -= group.size
                headers = db.execute(sql, (group.group_id,))
                rows += [Row(group, decode_header(blob)) for (blob,) in headers]
        return rows, total


def table(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the rows' columns, and how many rows each chunk has."""
    return {
        **{name: [getattr(row.group, name) for row in rows] for name in GroupRow._fields},
        **{name: [getattr(row.header, name) for row in rows] for name in SHOWN},
        "step": [None if row.group.step is None else row.group.step + 1 for row in rows],
        "chunks": [len(chunk) for chunk in cut(rows)],
    }


def cut(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield the rows of each chunk."""
    chunk, tokens = list[Row](), 0
    for row in rows:
        chunk.append(row)
        tokens += row.header.num_tokens
        if tokens >= CHUNK_TOKENS:
            yield chunk
            chunk, tokens = [], 0
    if chunk:
        yield chunk


class Chunks:
    """Packs the tokens of chunks; knows afterwards which ids there were."""

    def __init__(self, paths: RunPaths) -> None:
        self._ledger, self.ids = paths.ledger, set[int]()
        self.unreadable = 0
        """Trajectories whose payload is not what the header says: their tokens are left blank."""
        folder = paths.token_stats
        self._stats = lru_cache(maxsize=1)(lambda s, r: token_stats.read(folder, s, ranks=r))

    def pack(self, rows: Sequence[Row]) -> tuple[bytes, bytes]:
        """Return (what searching needs, the rest) of a chunk, for report_data.js.

        The first is 3 planes [T] of the ids' bytes. The rest: the mask [T]; 8 planes [N], the low
        bytes and the high bytes of version less the oldest one, logprob, advantage and difference
        (the last three as float16); and float32 pairs (index in T, reward) of rewards.
        """
        names = [row.header.trajectory_id for row in rows]
        parts, sampled = defaultdict[str, list[np.ndarray]](list), list[np.ndarray]()
        payloads = read_payloads(self._ledger, names, dropped=b"")
        for row, payload in zip(rows, payloads, strict=True):
            read = self._arrays(row.header, payload)
            for name, array in read.items():
                parts[name].append(array)
            sampled.append(self._of_sampled(row, read))
        tokens, mask, rewards = (
            np.concatenate(parts[k]) for k in ("tokens", "loss_mask", "rewards")
        )
        self.ids |= set(np.unique(tokens).tolist())
        given = np.flatnonzero(rewards)
        pairs = np.stack([given.astype("<u4").view("<f4"), rewards[given]], axis=1)
        halves = np.ascontiguousarray(np.concatenate(sampled, axis=1))
        low_high = halves.view(np.uint8).reshape(4, -1, 2).transpose(0, 2, 1)
        rest = mask.tobytes() + low_high.tobytes() + pairs.tobytes()
        return tokens.view(np.uint8).reshape(-1, 4)[:, :3].T.tobytes(), rest

    def _arrays(self, header: TrajectoryHeader, payload: bytes) -> dict[str, np.ndarray]:
        """Return FIELDS over all segments; blank ones for a payload that is not its header's."""
        with suppress(msgspec.MsgspecError, ValueError):
            segments = decode_segments(payload)
            found = {
                name: np.concatenate([np.frombuffer(getattr(s, name), kind) for s in segments])
                for name, kind in FIELDS.items()
            }
            sizes = {len(array) for array in found.values()}
            if sizes == {header.num_tokens} and found["loss_mask"].sum() == header.trained_tokens:
                return found
        self.unreadable += bool(payload)  # else it was dropped
        blank = {name: np.zeros(header.num_tokens, kind) for name, kind in FIELDS.items()}
        blank["loss_mask"][: header.trained_tokens] = 1
        return blank

    def _of_sampled(self, row: Row, read: dict[str, np.ndarray]) -> np.ndarray:
        """Return ages (as bits), logprobs, advantages, differences: float16 [4, row's N]."""
        mask = read["loss_mask"].astype(bool)
        ages_N = np.maximum(read["versions"][mask] - row.header.oldest_version, 0)
        logprobs_N = read["logprobs"][mask].clip(-6e4, 6e4).astype("<f2")
        unknown = np.full_like(logprobs_N, np.nan)
        stats = self._stats(row.group.step, row.group.ranks) if row.group.ranks else {}
        known = stats.get(row.header.trajectory_id, ())
        if {len(array) for array in known} != {len(unknown)}:
            known = unknown, unknown
        return np.stack([ages_N.astype("<u2").view("<f2"), logprobs_N, *known])
