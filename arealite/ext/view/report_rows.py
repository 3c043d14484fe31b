"""The trajectories of a report: their selection, a table of their headers, and chunks of tokens.

The table is small and drawn at once. A browser inflates a chunk in milliseconds, and only when its
tokens are looked at. Payloads are read one chunk at a time, so memory does not grow with the run.
Shape letter: T = tokens of a chunk.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from arealite.api.payloads import Payload
from arealite.api.trajectory import Segment, TrajectoryHeader
from arealite.api.trajectory_tree import TrajectoryTree
from arealite.base.trial_files import RunPaths
from arealite.ext.step_metrics import token_stats_store as token_stats
from arealite.system.ledger.ledger import connect, decode_header, read_payloads

CHUNK_TOKENS = 1 << 16
"""Approximate size of a chunk, which holds at least one trajectory."""
SHOWN = (
    "trajectory_id",
    "seat",
    "source",
    "reward",
    "reward_parts",
    "turns",
    "truncated",
    "interruptions",
    "segment_lengths",
    "num_tokens",
    "trained_tokens",
    "oldest_version",
    "newest_version",
    "seconds",
)
"""The fields of headers that are columns of the table."""
FIELDS = {
    "tokens": "<i4",
    "loss_mask": "u1",
    "logprobs": "<f4",
    "versions": "<i4",
    "rewards": "<f4",
}
"""A segment's arrays."""
DROPPED = Payload(prompt=b"", turns=b"")
"""Stands for a payload that is no longer in the ledger."""
TOKEN = np.dtype(
    [
        ("mask", "u1"),
        ("age", "<u2"),
        ("logprob", "<f2"),
        ("advantage", "<f2"),
        ("difference", "<f2"),
        ("reward", "<f4"),
    ]
)
"""The page's record of a token. `age` is its policy version less the trajectory's oldest; NaN means
unknown. Age, logprob, advantage and difference are 0 where the policy did not sample the token."""
SegmentTurns = list[list[tuple[int, int, str]]]
"""For each segment of a trajectory, its turns: start, number of reused tokens, and reason."""
GROUPS = """
SELECT group_id, g.task_id, state, reason, g.step, IFNULL(ranks, 0), COUNT(*)
FROM groups g JOIN trajectories USING (group_id) LEFT JOIN steps s USING (step)
GROUP BY seq ORDER BY g.step IS NULL, g.step, place, seq"""
"""Selects the fields of GroupRow."""
HEADERS = "SELECT header FROM trajectories WHERE group_id = ? ORDER BY member, seat"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
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


GROUP_FIELDS = [field.name for field in fields(GroupRow)]


class TrajectoryRow(NamedTuple):
    """A trajectory of a report."""

    group: GroupRow
    header: TrajectoryHeader


def choose(ledger: Path, most: int) -> tuple[list[TrajectoryRow], int]:
    """Return at most `most` trajectories, and the number of all.

    Groups are whole, evenly distributed over the steps and in their order; untrained ones are last.
    """
    with closing(connect(ledger, read_only=True)) as db:
        db.execute("BEGIN")  # a consistent view of a running run
        groups = [
            GroupRow(**dict(zip(GROUP_FIELDS, columns, strict=True)))
            for columns in db.execute(GROUPS)
        ]
        num_trajectories = sum(group.size for group in groups)
        rows = list[TrajectoryRow]()
        share = min(1.0, most / max(num_trajectories, 1))
        for group in _even_share(groups, share):
            for (header,) in db.execute(HEADERS, (group.group_id,)):
                rows.append(TrajectoryRow(group, decode_header(header)))
        return rows, num_trajectories


def _even_share(groups: Sequence[GroupRow], share: float) -> Iterator[GroupRow]:
    """Yield groups so that after each group, about `share` of all trajectories were yielded."""
    due = 0.0
    for group in groups:
        due += group.size * share
        if due > group.size - 1e-6:
            due -= group.size
            yield group


def table(rows: Sequence[TrajectoryRow]) -> dict[str, object]:
    """Return the columns of the rows, and the number of rows of each chunk."""
    columns = dict[str, object]()
    for name in GROUP_FIELDS:
        columns[name] = [getattr(row.group, name) for row in rows]
    for name in SHOWN:
        columns[name] = [getattr(row.header, name) for row in rows]
    steps = [row.group.step for row in rows]
    # The report counts steps from 1; None: the group is not trained.
    columns["step"] = [None if step is None else step + 1 for step in steps]
    columns["chunks"] = [len(chunk) for chunk in cut(rows)]
    return columns


def cut(rows: Sequence[TrajectoryRow]) -> Iterator[list[TrajectoryRow]]:
    """Yield the rows of each chunk."""
    chunk = list[TrajectoryRow]()
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
        read_stats = partial(token_stats.read, paths.token_stats)
        self._stats = lru_cache(maxsize=1)(read_stats)

    def pack(self, rows: Sequence[TrajectoryRow]) -> tuple[bytes, bytes, bytes]:
        """Return the blocks of a chunk: as byte planes, its token ids (u4 [T]) and TOKEN [T]; as
        JSON, the turns of each segment of each row.

        Search reads the first block only.
        """
        ids = [row.header.trajectory_id for row in rows]
        token_ids = list[np.ndarray]()
        token_records = list[np.ndarray]()
        turns_of_rows = list[SegmentTurns]()
        payloads = read_payloads(self._ledger, ids, dropped=DROPPED)
        for row, payload in zip(rows, payloads, strict=True):
            arrays, turns = self._arrays(row.header, payload)
            token_ids.append(arrays["tokens"])
            token_records.append(self._records(row, arrays))
            turns_of_rows.append(turns)
        token_ids_T = np.concatenate(token_ids)
        records_T = np.concatenate(token_records)
        distinct_ids = np.unique(token_ids_T)
        self.ids.update(distinct_ids.tolist())
        return (
            planes(token_ids_T),
            planes(records_T),
            msgspec.json.encode(turns_of_rows),
        )

    def _arrays(
        self, header: TrajectoryHeader, payload: Payload
    ) -> tuple[dict[str, np.ndarray], SegmentTurns]:
        """Return FIELDS over all segments, and the turns.

        If the payload contradicts the header, return zeros and [].
        """
        with suppress(msgspec.MsgspecError, ValueError):
            segments = TrajectoryTree.decode(payload).segments()
            arrays = {name: _concatenate(segments, name) for name in FIELDS}
            if _fits_header(arrays, header):
                return arrays, [_turns(segment) for segment in segments]
        if payload is not DROPPED:  # else it was dropped
            self.unreadable += 1
        blank = {name: np.zeros(header.num_tokens, dtype) for name, dtype in FIELDS.items()}
        blank["loss_mask"][: header.trained_tokens] = 1
        return blank, []

    def _records(self, row: TrajectoryRow, arrays: dict[str, np.ndarray]) -> np.ndarray:
        """Return TOKEN of a row's tokens."""
        mask = arrays["loss_mask"].astype(bool)
        ages = arrays["versions"] - row.header.oldest_version
        logprobs = arrays["logprobs"].clip(-6e4, 6e4)
        advantages, differences = self._trainer_stats(row)
        num_sampled = int(mask.sum())
        records = np.zeros(len(mask), TOKEN)
        records["mask"] = mask
        records["reward"] = arrays["rewards"]
        records["age"][mask] = np.maximum(ages[mask], 0)
        records["logprob"][mask] = logprobs[mask]
        if len(advantages) == len(differences) == num_sampled:
            records["advantage"][mask] = advantages
            records["difference"][mask] = differences
        else:
            records["advantage"][mask] = np.nan
            records["difference"][mask] = np.nan
        return records

    def _trainer_stats(self, row: TrajectoryRow) -> tuple[np.ndarray, np.ndarray]:
        """Return advantages and differences of a row's sampled tokens; empty if unknown."""
        unknown = (np.empty(0), np.empty(0))
        group = row.group
        if not group.ranks:
            return unknown
        stats = self._stats(group.step, ranks=group.ranks)
        return stats.get(row.header.trajectory_id, unknown)


def _concatenate(segments: Sequence[Segment], name: str) -> np.ndarray:
    """Return an array of FIELDS over all segments."""
    dtype = FIELDS[name]
    arrays = [np.frombuffer(getattr(segment, name), dtype) for segment in segments]
    return np.concatenate(arrays)


def _turns(segment: Segment) -> list[tuple[int, int, str]]:
    """Return start, number of reused tokens and reason of each turn of a segment."""
    return [(turn.start, turn.node.reused, turn.node.reason) for turn in segment.turns]


def _fits_header(arrays: dict[str, np.ndarray], header: TrajectoryHeader) -> bool:
    """Return whether arrays have the numbers of tokens and sampled tokens that a header has."""
    lengths = {len(array) for array in arrays.values()}
    num_sampled = arrays["loss_mask"].sum()
    return lengths == {header.num_tokens} and num_sampled == header.trained_tokens


def planes(values: np.ndarray) -> bytes:
    """Return the first byte of each value, then each second byte, and so on: they compress well."""
    bytes_of_values = values.view(np.uint8).reshape(-1, values.itemsize)
    return bytes_of_values.T.tobytes()
