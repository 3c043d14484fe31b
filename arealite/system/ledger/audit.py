"""Holds a trial's ledger against its promises: nothing lost, nothing repeated, no token too old.

Reads the file, and the configs beside it if there are any, so it works on a run that lives, died or
was copied elsewhere.
"""

from __future__ import annotations

import math
import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from arealite.api.trajectory import Segment, encode_segments
from arealite.base import config as base_config
from arealite.base.errors import UserError
from arealite.base.names import RunPaths
from arealite.system.ledger.ledger import connect, decode_header

IN_STATE = {
    "trained": ("trained", "durable"),
    "filtered": ("filtered",),
    "buffered": ("complete", "batched"),
    "in_flight": ("offered", "leased"),
}
"""The states of groups, as the balance counts them."""
TRAINED = f"""
(SELECT g.step, t.* FROM trajectories t JOIN groups g USING (group_id)
 WHERE g.state IN {IN_STATE["trained"]})"""
TOKEN_BYTES = 17
"""Of a token in a payload: its id, mask, logprob, version and reward."""
SEGMENT_BYTES = len(encode_segments([Segment(b"", b"", b"", b"", b"", 1.0)])) + 5 * 3
"""What a segment has beside its tokens, at most: a long array's length takes 3 bytes more."""
SHOWN = 5
"""Ids named in a line of problems."""

SAID = "(SELECT step, value AS trajectory_id FROM steps, json_each(trained))"
CHECKS = {
    "lost": {
        "holes in the dataset's order, before": """
            SELECT 'g' || seq FROM
              (SELECT seq, LAG(seq, 1, -1) OVER (ORDER BY seq) AS before FROM groups)
            WHERE seq > before + 1""",
        "trajectories without a group": """
            SELECT trajectory_id FROM trajectories
            WHERE group_id NOT IN (SELECT group_id FROM groups)""",
        # that is, with a member neither finished nor failed for good
        "groups with missing members": """
            SELECT g.group_id FROM groups g
            WHERE g.state IN ('complete', 'batched', 'trained', 'durable') AND (
              SELECT COUNT(*) FROM (
                SELECT member FROM trajectories t WHERE t.group_id = g.group_id
                UNION SELECT member FROM failures f WHERE f.group_id = g.group_id AND :attempts
                GROUP BY member HAVING COUNT(*) >= :attempts)
              ) < (SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'group_size')""",
        "steps reported or trained only": f"""
            SELECT step FROM (
              SELECT step FROM steps
              UNION ALL SELECT DISTINCT step FROM groups WHERE state IN {IN_STATE["trained"]})
            GROUP BY step HAVING COUNT(*) = 1""",
        "steps without a report, which a later one has": """
            SELECT DISTINCT step FROM groups
            WHERE state = 'batched' AND step < (SELECT MAX(step) FROM steps) ORDER BY step""",
    },
    "repeated": {
        "steps whose trained ids are not the batch's": f"""
            SELECT DISTINCT step FROM
              (SELECT * FROM {SAID} UNION ALL SELECT step, trajectory_id FROM {TRAINED})
            GROUP BY step, trajectory_id HAVING COUNT(*) != 2""",
        "trained twice": f"""
            SELECT trajectory_id FROM {SAID} GROUP BY trajectory_id HAVING COUNT(*) > 1""",
        "kept twice": """
            SELECT group_id || '/' || member || '/' || seat FROM trajectories
            GROUP BY group_id, member, seat HAVING COUNT(*) > 1""",
    },
    "broken": {
        "trained with tokens older than max_staleness={max_staleness:g}": f"""
            SELECT trajectory_id FROM {TRAINED} WHERE step - oldest > :max_staleness""",
        "trained with a payload unlike its header": f"""
            SELECT trajectory_id FROM {TRAINED} WHERE is_unlike(header, tokens, LENGTH(payload))""",
        "with turns left over of an ended episode": """
            SELECT DISTINCT u.group_id || '/' || u.member FROM turns u LEFT JOIN groups g
            USING (group_id) LEFT JOIN trajectories t USING (group_id, member)
            WHERE t.member NOTNULL OR g.state IS NULL OR g.state NOT IN ('offered', 'leased')""",
    },
}
"""By the report's field: what may not be, and the query that finds it."""


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
        files = [file for file in (paths.config, *paths.starts.values()) if file.exists()]
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

    def balance(sql: str) -> Balance:
        held = dict(db.execute(f"{sql} GROUP BY state"))
        sums = {k: sum(held.get(state, 0) for state in v) for k, v in IN_STATE.items()}
        return Balance(sum(held.values()), **sums)

    db.create_function("is_unlike", 3, _is_unlike)
    given = vars(promises)
    problems = {
        field: [
            f"{len(names)} {what.format(**given)}: "
            f"{', '.join(names[:SHOWN])}{' …' if names[SHOWN:] else ''}"
            for what, sql in checks.items()
            if (names := [str(name) for (name,) in db.execute(sql, given)])
        ]
        for field, checks in CHECKS.items()
    }
    failed = "SELECT reason, COUNT(*) FROM groups WHERE state = 'filtered' GROUP BY reason"
    versions = "SELECT oldest FROM trajectories UNION SELECT newest FROM trajectories"
    return AuditReport(
        groups=balance("SELECT state, COUNT(*) FROM groups"),
        tokens=balance(
            "SELECT state, SUM(tokens) FROM trajectories LEFT JOIN groups USING (group_id)"
        ),
        filtered_by_reason=dict(db.execute(failed)),
        failures_by_class=dict(db.execute("SELECT class, COUNT(*) FROM failures GROUP BY class")),
        steps=one("SELECT COUNT(*) FROM steps"),
        checkpoints=one("SELECT COUNT(*) FROM checkpoints"),
        trained_trajectories=one(f"SELECT COUNT(*) FROM {TRAINED}"),
        mixed_version_trajectories=one(f"SELECT COUNT(*) FROM {TRAINED} WHERE oldest != newest"),
        interrupted=one(f"SELECT SUM(interruptions) FROM {TRAINED}"),
        weight_versions=one(f"SELECT COUNT(*) FROM ({versions})"),
        max_staleness=one(f"SELECT MAX(step - oldest) FROM {TRAINED}"),
        **problems,
    )


def _is_unlike(blob: bytes, tokens: int, size: int) -> bool:
    """Say whether a payload of `size` bytes cannot hold the tokens of its header."""
    header = decode_header(blob)
    spare, most = (
        size - TOKEN_BYTES * header.num_tokens,
        SEGMENT_BYTES * len(header.segment_lengths),
    )
    return tokens != header.num_tokens or not 0 < spare <= most
