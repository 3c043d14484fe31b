"""The trajectories of a report: their selection, a table of their headers, and chunks of tokens.

The table is small and drawn at once. A browser inflates a chunk in milliseconds, and only when its
tokens are looked at. Payloads are read one chunk at a time, so memory does not grow with the run.
Shape letter: T = tokens of a chunk.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from arealite.api.payloads import decode_segments
from arealite.api.trajectory import TrajectoryHeader
from arealite.base.names import RunPaths
from arealite.system.ledger import token_stats
from arealite.system.ledger.ledger import connect, decode_header, read_payloads

CHUNK_TOKENS = 1 << 16
"""Approximate size of a chunk, which holds at least one trajectory."""
SHOWN = (
    *("trajectory_id", "seat", "source", "reward", "reward_parts", "turns", "truncated"),
    *("interruptions", "segment_lengths", "num_tokens", "trained_tokens", "oldest_version"),
    *("newest_version", "seconds"),
)
"""The fields of headers that are columns of the table."""
FIELDS = {
    "tokens": "<i4", "loss_mask": "u1", "logprobs": "<f4", "versions": "<i4", "rewards": "<f4",
}  # fmt: skip
"""A segment's arrays."""
TOKEN = np.dtype([
    ("mask", "u1"), ("age", "<u2"), ("logprob", "<f2"), ("advantage", "<f2"),
    ("difference", "<f2"), ("reward", "<f4"),
])  # fmt: skip
"""The page's record of a token. `age` is its policy version less the trajectory's oldest; NaN means
unknown. Age, logprob, advantage and difference are 0 where the policy did not sample the token."""


Tree = list[list[tuple[int, int, str]]]
"""For each segment, a list of its turns: start, number of reused tokens, and reason."""


class GroupRow(NamedTuple):
    """A group of the ledger that has trajectories."""

    group_id: str
    task_id: str
    state: str
    reason: str | None
    step: int | None
    ranks: int
    """Number of ranks that trained its step; 0 if the group is not trained."""
    size: int
    """Number of trajectories."""


class Row(NamedTuple):
    """A trajectory of a report."""

    group: GroupRow
    header: TrajectoryHeader


def choose(ledger: Path, most: int) -> tuple[list[Row], int]:
    """Return at most `most` trajectories, and the number of all.

    Groups are whole, evenly distributed over the steps and in their order; untrained ones are last.
    """
    with closing(connect(ledger, read_only=True)) as db:
        db.execute("BEGIN")  # a consistent view of a running run
        groups = [GroupRow(*row) for row in db.execute("""
            SELECT group_id, g.task_id, state, reason, g.step, IFNULL(ranks, 0), COUNT(*)
            FROM groups g JOIN trajectories USING (group_id) LEFT JOIN steps s USING (step)
            GROUP BY seq ORDER BY g.step IS NULL, g.step, place, seq""")]  # fmt: skip
        total = sum(group.size for group in groups)
        share = min(1.0, most / max(total, 1))
        due = 0.0
        rows = list[Row]()
        sql = "SELECT header FROM trajectories WHERE group_id = ? ORDER BY member, seat"
        for group in groups:
            due += group.size * share
            if due > group.size - 1e-6:
                due -= group.size
                headers = db.execute(sql, (group.group_id,))
                rows += [Row(group, decode_header(blob)) for (blob,) in headers]
        return rows, total


def table(rows: Sequence[Row]) -> dict[str, object]:
    """Return the columns of the rows, and the number of rows of each chunk."""
    return {
        **{name: [getattr(row.group, name) for row in rows] for name in GroupRow._fields},
        **{name: [getattr(row.header, name) for row in rows] for name in SHOWN},
        "step": [None if row.group.step is None else row.group.step + 1 for row in rows],
        "chunks": [len(chunk) for chunk in cut(rows)],
    }


def cut(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield the rows of each chunk."""
    chunk = list[Row]()
    tokens = 0
    for row in rows:
        chunk.append(row)
        tokens += row.header.num_tokens
        if tokens >= CHUNK_TOKENS:
            yield chunk
            chunk = []
            tokens = 0
    if chunk:
        yield chunk


class Chunks:
    """Packs the tokens of chunks, and collects the token ids that occur."""

    def __init__(self, paths: RunPaths) -> None:
        self._ledger = paths.ledger
        self.ids = set[int]()
        self.unreadable = 0
        """Number of payloads that contradict their headers; these tokens are left blank."""
        folder = paths.token_stats
        self._stats = lru_cache(maxsize=1)(lambda s, r: token_stats.read(folder, s, ranks=r))

    def pack(self, rows: Sequence[Row]) -> tuple[bytes, bytes, bytes]:
        """Return the blocks of a chunk: as byte planes, its token ids (u4 [T]) and TOKEN [T]; as
        JSON, the turns of each segment of each row.

        Search reads the first block only.
        """
        names = [row.header.trajectory_id for row in rows]
        ids = list[np.ndarray]()
        known = list[np.ndarray]()
        trees = list[Tree]()
        for row, payload in zip(rows, read_payloads(self._ledger, names, dropped=b""), strict=True):
            arrays, turns = self._arrays(row.header, payload)
            trees.append(turns)
            ids.append(arrays["tokens"])
            known.append(self._known(row, arrays))
        tokens = np.concatenate(ids)
        self.ids |= set(np.unique(tokens).tolist())
        return planes(tokens), planes(np.concatenate(known)), msgspec.json.encode(trees)

    def _arrays(
        self, header: TrajectoryHeader, payload: bytes
    ) -> tuple[dict[str, np.ndarray], Tree]:
        """Return FIELDS over all segments, and the turns.

        If the payload contradicts the header, return zeros and [].
        """
        with suppress(msgspec.MsgspecError, ValueError):
            segments = decode_segments(payload)
            found = {
                name: np.concatenate([np.frombuffer(getattr(s, name), kind) for s in segments])
                for name, kind in FIELDS.items()
            }
            sizes = {len(array) for array in found.values()}
            if sizes == {header.num_tokens} and found["loss_mask"].sum() == header.trained_tokens:
                return found, [[(t.start, t.reused, t.reason) for t in s.turns] for s in segments]
        self.unreadable += bool(payload)  # an empty one was dropped
        blank = {name: np.zeros(header.num_tokens, kind) for name, kind in FIELDS.items()}
        blank["loss_mask"][: header.trained_tokens] = 1
        return blank, []

    def _known(self, row: Row, arrays: dict[str, np.ndarray]) -> np.ndarray:
        """Return TOKEN of a row's tokens."""
        mask = arrays["loss_mask"].astype(bool)
        known = np.zeros(len(mask), TOKEN)
        known["mask"] = mask
        known["reward"] = arrays["rewards"]
        ages = arrays["versions"] - row.header.oldest_version
        known["age"][mask] = np.maximum(ages[mask], 0)
        known["logprob"][mask] = arrays["logprobs"][mask].clip(-6e4, 6e4)
        stats = self._stats(row.group.step, row.group.ranks) if row.group.ranks else {}
        pair = stats.get(row.header.trajectory_id, (np.empty(0), np.empty(0)))
        fits = {len(array) for array in pair} == {int(mask.sum())}
        known["advantage"][mask], known["difference"][mask] = pair if fits else (np.nan, np.nan)
        return known


def planes(values: np.ndarray) -> bytes:
    """Return the first byte of each value, then each second byte, and so on: they compress well."""
    return values.view(np.uint8).reshape(-1, values.itemsize).T.tobytes()
