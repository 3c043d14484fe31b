"""Holds a trial's ledger against its promises: nothing lost, nothing repeated, no token too old.

Reads the file, and the configs beside it if there are any, so it works on a run that lives, died or
was copied elsewhere.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from arealite.api.trajectory import Segment, encode_segments
from arealite.base import config as base_config
from arealite.base.errors import UserError
from arealite.base.names import RunPaths
from arealite.system.ledger import connect, decode_header

TRAINED = "('trained', 'durable')"
IN_STATE = {
    "trained": TRAINED,
    "filtered": "('filtered')",
    "buffered": "('complete', 'batched')",
    "in_flight": "('offered', 'leased')",
}
JOINED = "FROM trajectories t JOIN groups g USING (group_id)"
TOKEN_BYTES = 17
"""Of a token in a payload: its id, mask, logprob, version and reward."""
SEGMENT_BYTES = len(encode_segments([Segment(b"", b"", b"", b"", b"", 1.0)])) + 5 * 3
"""What a segment has beside its tokens, at most: a long array's length takes 3 bytes more."""
SHOWN = 5
"""Ids named in a line of problems."""


@dataclass(frozen=True)
class Balance:
    """offered = trained + filtered + buffered + in_flight, in groups or in tokens received."""

    offered: int
    trained: int
    filtered: int
    buffered: int
    in_flight: int

    @property
    def is_even(self) -> bool:
        """Whether both sides are equal."""
        return self.offered == self.trained + self.filtered + self.buffered + self.in_flight


@dataclass(frozen=True)
class AuditReport:
    """What the ledger holds, and what is wrong with it."""

    groups: Balance
    tokens: Balance
    filtered_by_reason: dict[str, int]
    failures_by_class: dict[str, int]
    steps: int
    checkpoints: int
    trained_trajectories: int
    mixed_version_trajectories: int
    """Trained ones whose tokens are of more than one policy version."""
    interrupted: int
    """Generations of trained trajectories that a weight update cut."""
    weight_versions: int
    """Policy versions seen as oldest or newest of any trajectory."""
    max_staleness: int
    """Of a trained token: its step less its version."""
    lost: list[str] = field(default_factory=list[str])
    """What is missing although the ledger says it is there."""
    repeated: list[str] = field(default_factory=list[str])
    """What was used twice."""
    broken: list[str] = field(default_factory=list[str])
    """Other promises: trained tokens too old, payloads unlike their headers, turns left over."""

    @property
    def ok(self) -> bool:
        """Whether both balances are even and no promise is broken."""
        problems = self.lost or self.repeated or self.broken
        return self.groups.is_even and self.tokens.is_even and not problems

    def table(self) -> str:
        """Write the report for a reader."""
        lines = [f"{'':<28}{'groups':>12}{'tokens':>16}"]
        for name, groups in vars(self.groups).items():
            tokens = getattr(self.tokens, name)
            lines.append(f"{name.replace('_', ' '):<28}{groups:>12}{tokens:>16}")
        counts = {f"filtered: {k}": n for k, n in sorted(self.filtered_by_reason.items())}
        counts |= {f"failed episodes: {k}": n for k, n in sorted(self.failures_by_class.items())}
        counts |= {k.replace("_", " "): v for k, v in vars(self).items() if isinstance(v, int)}
        lines += [f"{name:<28}{number:>12}" for name, number in counts.items()]
        for name in ("lost", "repeated", "broken"):
            problems: list[str] = getattr(self, name)
            lines.append(f"{name:<28}{len(problems):>12}")
            lines += [f"  {problem}" for problem in problems]
        verdict = "balanced: nothing lost, nothing repeated" if self.ok else "OUT OF BALANCE"
        return "\n".join([*lines, verdict])


def audit(ledger_path: Path) -> AuditReport:
    """Read a ledger, which may be in use, and check it.

    Raises:
        UserError: the file is not a ledger.
    """
    try:
        with closing(connect(ledger_path, read_only=True)) as db:
            db.execute("BEGIN")  # one snapshot for all that follows
            return _audit(db, Promises.of(RunPaths(ledger_path.parent)))
    except sqlite3.Error as error:
        raise UserError(f"{ledger_path} cannot be read as a ledger: {error}.") from error


@dataclass(frozen=True)
class Promises:
    """What holds for a run, by the configs it was started with."""

    max_staleness: float = math.inf
    """The largest it was given; infinity where tokens may be older."""
    attempts: int = 1
    """Failures after which a group may go without a member; 0: it may not."""

    @classmethod
    def of(cls, paths: RunPaths) -> Promises:
        """Read the configs; without any, promise what each run keeps."""
        files = [file for file in (paths.config, *paths.configs.glob("*.yaml")) if file.exists()]
        found = [base_config.read(file).trainer.ppo for file in files]
        if not found:
            return cls()
        is_masked = any(ppo.staleness_policy == "mask" for ppo in found)
        partial = [ppo.max_attempts for ppo in found if ppo.get("partial_group") == "min_size"]
        oldest = math.inf if is_masked else max(ppo.max_staleness for ppo in found)
        return cls(oldest, min(partial, default=0))


def _audit(db: sqlite3.Connection, promises: Promises) -> AuditReport:
    def one(sql: str) -> int:
        return int(db.execute(sql).fetchone()[0] or 0)

    groups = {
        name: one(f"SELECT COUNT(*) FROM groups WHERE state IN {states}")
        for name, states in IN_STATE.items()
    }
    tokens = {
        name: one(f"SELECT SUM(t.tokens) {JOINED} WHERE g.state IN {states}")
        for name, states in IN_STATE.items()
    }
    trained = f"{JOINED} WHERE g.state IN {TRAINED}"
    versions = "SELECT oldest AS v FROM trajectories UNION SELECT newest FROM trajectories"
    return AuditReport(
        groups=Balance(one("SELECT COUNT(*) FROM groups"), **groups),
        tokens=Balance(one("SELECT SUM(tokens) FROM trajectories"), **tokens),
        filtered_by_reason=dict(
            db.execute(
                "SELECT reason, COUNT(*) FROM groups WHERE state = 'filtered' GROUP BY reason"
            )
        ),
        failures_by_class=dict(db.execute("SELECT class, COUNT(*) FROM failures GROUP BY class")),
        steps=one("SELECT COUNT(*) FROM steps"),
        checkpoints=one("SELECT COUNT(*) FROM checkpoints"),
        trained_trajectories=one(f"SELECT COUNT(*) {trained}"),
        mixed_version_trajectories=one(f"SELECT COUNT(*) {trained} AND t.oldest != t.newest"),
        interrupted=one(f"SELECT SUM(t.interruptions) {trained}"),
        weight_versions=one(f"SELECT COUNT(*) FROM ({versions})"),
        max_staleness=one(f"SELECT MAX(g.step - t.oldest) {trained}"),
        lost=_lost(db, promises.attempts),
        repeated=_repeated(db),
        broken=_broken(db, promises.max_staleness),
    )


def _lost(db: sqlite3.Connection, attempts: int) -> list[str]:
    found: list[str] = []
    cursor, top = db.execute("SELECT COUNT(*), COALESCE(MAX(seq), -1) + 1 FROM groups").fetchone()
    if cursor != top:
        found.append(f"{top - cursor} groups of the dataset's order are missing")
    orphans = db.execute(
        "SELECT trajectory_id FROM trajectories WHERE group_id NOT IN (SELECT group_id FROM groups)"
    )
    found += _named("trajectories without a group", [row[0] for row in orphans])
    return found + _named("groups with missing members", _short_groups(db, attempts)) + _holes(db)


def _short_groups(db: sqlite3.Connection, attempts: int) -> list[str]:
    """Groups past completion that have a member neither finished nor failed for good."""
    (size,) = db.execute("SELECT value FROM meta WHERE key = 'group_size'").fetchone()
    rows = db.execute(
        """SELECT g.group_id FROM groups g
           WHERE g.state IN ('complete', 'batched', 'trained', 'durable') AND (
             SELECT COUNT(*) FROM (
               SELECT member FROM trajectories t WHERE t.group_id = g.group_id
               UNION SELECT member FROM failures f WHERE f.group_id = g.group_id AND ?1
               GROUP BY member HAVING COUNT(*) >= ?1)) < ?2""",
        (attempts, int(size)),
    )
    return [row[0] for row in rows]


def _holes(db: sqlite3.Connection) -> list[str]:
    """Steps whose groups are trained although the trainer never said so, and the other way; and
    batches that a later one has overtaken."""
    reported = set(db.execute("SELECT step FROM steps"))
    trained = set(db.execute(f"SELECT DISTINCT step FROM groups WHERE state IN {TRAINED}"))
    odd = sorted(str(step) for (step,) in reported ^ trained)
    overtaken = db.execute(
        "SELECT DISTINCT step FROM groups WHERE state = 'batched' "
        "AND step < (SELECT MAX(step) FROM steps) ORDER BY step"
    )
    found = _named("steps reported or trained only", odd)
    return found + _named("steps without a report", [str(step) for (step,) in overtaken])


def _broken(db: sqlite3.Connection, max_staleness: float) -> list[str]:
    sql = f"SELECT t.trajectory_id {JOINED} WHERE g.state IN {TRAINED} AND g.step - t.oldest > ?"
    old = [row[0] for row in db.execute(sql, (max_staleness,))]
    sql = f"SELECT t.header, t.tokens, LENGTH(t.payload) {JOINED} WHERE g.state IN {TRAINED}"
    unlike: list[str] = []
    for blob, tokens, size in db.execute(sql):
        header = decode_header(blob)
        spare = size - TOKEN_BYTES * header.num_tokens
        if tokens != header.num_tokens or not 0 < spare <= SEGMENT_BYTES * len(
            header.segment_lengths
        ):
            unlike.append(header.trajectory_id)
    left = db.execute(
        "SELECT DISTINCT u.group_id || '/' || u.member FROM turns u LEFT JOIN groups g "
        "USING (group_id) LEFT JOIN trajectories t USING (group_id, member) "
        "WHERE t.member NOTNULL OR g.state IS NULL OR g.state NOT IN ('offered', 'leased')"
    )
    found = _named(f"trained with tokens older than max_staleness={max_staleness:g}", old)
    found += _named("trained with a payload unlike its header", unlike)
    return found + _named("with turns left over of an ended episode", [row[0] for row in left])


def _repeated(db: sqlite3.Connection) -> list[str]:
    found: list[str] = []
    used: Counter[str] = Counter()
    for step, text in db.execute("SELECT step, trained FROM steps").fetchall():
        said: list[str] = json.loads(text)
        used.update(said)
        sql = f"SELECT t.trajectory_id {JOINED} WHERE g.step = ? AND g.state IN {TRAINED}"
        rows = db.execute(sql, (step,))
        if sorted(said) != sorted(row[0] for row in rows):
            found.append(f"step {step}: the trainer's ids are not the batch's")
    found += _named("trained twice", sorted(t for t, n in used.items() if n > 1))
    twice = db.execute(
        "SELECT group_id || '/' || member || '/' || seat FROM trajectories "
        "GROUP BY group_id, member, seat HAVING COUNT(*) > 1"
    )
    return found + _named("kept twice", [row[0] for row in twice])


def _named(what: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    return [f"{len(names)} {what}: {', '.join(names[:SHOWN])}{' …' if names[SHOWN:] else ''}"]
