"""Audits a ledger: no sample is lost, none is repeated, no trained token is too old.

The audit reads only the file, and the configs beside it if they exist. The run may be active, ended
or copied. The audit reads all rows and payloads, or only those after the *mark*. The datapipe
stores the mark in the ledger: all records before it passed an audit.
"""

import math
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from arealite.api.payloads import decode_segments
from arealite.base import config as base_config
from arealite.base.errors import UserError
from arealite.base.names import RunPaths
from arealite.system.ledger import schema
from arealite.system.ledger.audit_report import IN_STATE, AuditReport, Balance
from arealite.system.ledger.ledger import columns, connect, decode_header
from arealite.system.ledger.payloads import find_mismatch, whole_payload

CLOSED = ("durable", "filtered")
"""Final states of groups; only a roll-back changes them."""
TRAINED = f"""
(SELECT g.step, t.* FROM trajectories t JOIN groups g USING (group_id)
 WHERE g.state IN {IN_STATE["trained"]})"""
SHOWN = 5
"""Maximum number of ids in one line of the report."""

REPORTED = """(SELECT step, value AS trajectory_id
 FROM steps, json_each(IIF(json_valid(trained), trained, '[]')))"""
UNUSABLE = "IFNULL(reason, '') LIKE 'unusable:%'"
CHECKS = {
    "lost": {
        "groups missing from the dataset's order": """
            SELECT 'g' || (before + 1) FROM
              (SELECT seq, LAG(seq, 1, :seq - 1) OVER (ORDER BY seq) AS before FROM groups
               WHERE seq >= :seq
               UNION ALL SELECT rows, (SELECT MAX(seq) FROM main.groups) FROM heads
               WHERE name = 'groups')
            WHERE seq > before + 1""",
        "trajectories missing after": """
            SELECT before FROM
              (SELECT n, LAG(n, 1, :row) OVER win AS last,
                 LAG(trajectory_id, 1, 'the beginning') OVER win AS before
               FROM trajectories WHERE n > :row WINDOW win AS (ORDER BY n)
               UNION ALL SELECT rows + 1, t.rowid, trajectory_id FROM heads, main.trajectories t
               WHERE name = 'trajectories'
               AND t.rowid = (SELECT MAX(rowid) FROM main.trajectories))
            WHERE n > last + 1""",
        "trajectories without a group": """
            SELECT trajectory_id FROM trajectories
            WHERE group_id NOT IN (SELECT group_id FROM groups)""",
        # a member has neither finished nor used all attempts
        "groups with missing members": """
            SELECT g.group_id FROM groups g
            WHERE g.state IN ('complete', 'batched', 'trained', 'durable') AND (
              SELECT COUNT(*) FROM (
                SELECT member FROM trajectories t WHERE t.group_id = g.group_id
                UNION SELECT member FROM failures f WHERE f.group_id = g.group_id AND :attempts
                GROUP BY member HAVING COUNT(*) >= :attempts)
              ) < (SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'group_size')""",
        "steps with only a report or trained groups": f"""
            SELECT step + 1 FROM (
              SELECT step FROM steps
              UNION ALL SELECT DISTINCT step FROM groups WHERE state IN {IN_STATE["trained"]})
            GROUP BY step HAVING COUNT(*) = 1""",
        "unreported steps before a reported step": """
            SELECT DISTINCT step + 1 FROM groups
            WHERE state = 'batched' AND step < (SELECT MAX(step) FROM steps) ORDER BY step""",
    },
    "repeated": {
        "steps whose reported ids differ from the batch": f"""
            SELECT DISTINCT step + 1 FROM
              (SELECT * FROM {REPORTED} UNION ALL SELECT step, trajectory_id FROM {TRAINED})
            GROUP BY step, trajectory_id HAVING COUNT(*) != 2""",
        "trajectories stored twice": """
            SELECT group_id || '/' || member || '/' || seat FROM trajectories
            GROUP BY group_id, member, seat HAVING COUNT(*) > 1""",
    },
    "broken": {
        "trained trajectories with tokens older than max_staleness={max_staleness:g}": f"""
            SELECT trajectory_id FROM {TRAINED} WHERE step - oldest > :max_staleness""",
        "ended episodes with stored turns": """
            SELECT DISTINCT u.group_id || '/' || u.member FROM turns u LEFT JOIN groups g
            USING (group_id) LEFT JOIN trajectories t USING (group_id, member)
            WHERE t.member NOTNULL OR g.state IS NULL OR g.state NOT IN ('offered', 'leased')""",
    },
}
"""By field of the report: the text of a problem, and the query that finds it."""
ROWS = {
    "groups": f"SELECT IFNULL(state, '') IN {CLOSED}, IFNULL(state, ''), sum, {{columns}} "
    "FROM groups",
    "steps": "SELECT step < {durable}, '', sum, {columns} FROM steps",
    "failures": f"SELECT IFNULL(state, '') IN {CLOSED}, class, f.sum, {{columns}} "
    "FROM failures f LEFT JOIN groups g USING (group_id)",
    "trajectories": f"SELECT IFNULL(state, '') IN {CLOSED}, IFNULL(state, ''), t.sum, {{columns}}, "
    f"step, n, {UNUSABLE}, payload_sum, payload FROM trajectories t "
    "LEFT JOIN groups g USING (group_id)",
}
"""By table: a query for whether a row is final, its state or class, its checksum, and the columns
of the checksum."""
OnRow = Callable[[int, int], None]
Row = tuple[Any, ...]


@dataclass(frozen=True)
class Guarantees:
    """The guarantees of a run, from the configs of all its starts."""

    max_staleness: float = math.inf
    """The largest configured staleness; infinity if a policy allows older tokens."""
    attempts: int = 1
    """Failures after which a group may lack a member; 0: no member may be missing."""

    @classmethod
    def of(cls, paths: RunPaths) -> "Guarantees":
        """Read the configs of a run; without any, return the guarantees of every run."""
        files = [file for file in (paths.config, *paths.starts.values()) if file.exists()]
        starts = [base_config.read_saved(file)["trainer"]["ppo"] for file in files]
        if not starts:
            return cls()
        is_masked = any(ppo["staleness_policy"] == "mask" for ppo in starts)
        partial = [ppo["max_attempts"] for ppo in starts if ppo.get("partial_group") == "min_size"]
        oldest = math.inf if is_masked else max(ppo["max_staleness"] for ppo in starts)
        return cls(oldest, min(partial, default=0))


class Mark(msgspec.Struct, frozen=True):
    """The position up to which a ledger passed an audit."""

    row: int = 0
    """Row id of the last audited trajectory."""
    seq: int = 0
    """`tally` includes the groups before this number, except those in `open`."""
    step: int = 0
    """`tally` includes the steps before this number: a checkpoint contains them."""
    open: list[int] = []
    """Numbers of the audited groups that were neither durable nor filtered."""
    tally: dict[str, int] = {}
    """By name: counts and sums of the audited records."""


def audit(path: Path, *, new_only: bool = False, on_row: OnRow | None = None) -> AuditReport:
    """Read a ledger, which may be in use, and check it.

    Args:
        path: The ledger's file.
        new_only: Skip the records before the mark.
        on_row: Called every 64 trajectories with the number of the current and the last trajectory.

    Raises:
        UserError: the file is not a ledger, or is damaged.
    """
    paths = RunPaths(path.parent)
    # Listed before the snapshot begins, so the snapshot has every step of these checkpoints.
    saved = [int(folder.name[5:]) for folder in paths.checkpoints.glob("step-*[0-9]")]
    try:
        with closing(connect(path, read_only=True)) as db:
            # A tampered row may not be UTF-8.
            db.text_factory = partial(str, encoding="utf-8", errors="replace")
            db.execute("BEGIN")  # one snapshot for all queries
            return Audit(db, new_only).run(Guarantees.of(paths), max(saved, default=0), on_row)
    except sqlite3.Error as error:
        what = f"{path} cannot be read as a ledger: {error}.{_unreadable(path)}"
        fix = "Restore a copy, or export the newest checkpoint and begin another trial with it."
        raise UserError(f"{what} {fix}") from error


class Audit:
    """An audit of one snapshot. Temporary views hide the records before the mark."""

    def __init__(self, db: sqlite3.Connection, new_only: bool) -> None:
        self.db = db
        self.is_whole = not new_only
        self.mark = Mark()
        meta = dict(db.execute("SELECT key, value FROM meta"))
        self.has_sums = meta.get("schema", "") >= "4"
        if new_only:
            with suppress(msgspec.MsgspecError):  # none yet
                self.mark = msgspec.json.decode(meta.get("audited", ""), type=Mark)
        self.dropped = int(meta.get("dropped", 0))
        self.found = Counter[str](), Counter(self.mark.tally)
        """Counts of open records, and of final records (only a roll-back changes those)."""
        self.problems = defaultdict[str, dict[str, list[str]]](lambda: defaultdict(list))
        """By field of the report and text of the problem: ids."""
        self._narrow()

    def _narrow(self) -> None:
        """Create a view over each table with only the records after the mark."""
        mark = self.mark
        seqs = ", ".join(map(str, self.mark.open))
        newer = {
            "groups": f"seq >= {mark.seq} OR seq IN ({seqs})",
            "steps": f"step >= {mark.step}",
            "failures": "group_id IN (SELECT group_id FROM groups)",
            "trajectories": f"rowid > {mark.row} OR group_id IN "
            f"(SELECT group_id FROM main.groups WHERE seq IN ({seqs}))",
        }
        for table, where in newer.items():
            lacks = ", NULL AS payload_sum, rowid AS n" if table == "trajectories" else ""
            lacks = "" if self.has_sums else f", NULL AS sum{lacks}"
            sql = f"CREATE TEMP VIEW {table} AS SELECT *{lacks} FROM main.{table} WHERE "
            self.db.execute(sql + (where if mark.row else "true"))
        if not self.has_sums:
            self.db.execute("CREATE TEMP TABLE heads (name, rows, sum)")

    def run(self, guarantees: Guarantees, saved: int, on_row: OnRow | None) -> AuditReport:
        """Check all rules.

        Args:
            guarantees: The guarantees of the run.
            saved: Step of the newest checkpoint folder; 0 without one.
            on_row: Progress callback, as in `audit`.
        """
        one = "SELECT IFNULL(MAX(rowid), 0), (SELECT IFNULL(MAX(step), 0) FROM checkpoints), "
        one += "(SELECT IFNULL(MAX(seq) + 1, 0) FROM main.groups) FROM main.trajectories"
        last, durable, seq = self.db.execute(one).fetchone()
        for table, query in ROWS.items():
            covered = schema.COVERED[table]
            size = covered.count(",") + 1
            for each in self.db.execute(query.format(columns=covered, durable=durable)):
                (is_closed, state, found), row = each[:3], each[3 : 3 + size]
                self._count(table, is_closed, state, found, row)
                if table == "trajectories":
                    step, n, *kept = each[3 + size :]
                    self._check(state, row, step, *kept)
                    if on_row and n % 64 == 0:
                        on_row(n, last)
        values = vars(guarantees) | {"seq": self.mark.seq, "row": self.mark.row}
        for kind, checks in CHECKS.items():
            for what, sql in checks.items():
                if names := [str(name) for (name,) in self.db.execute(sql, values)]:
                    self.problems[kind][what.format(**values)] = names
        tally = {name: number & schema.CHECKSUM_MASK for name, number in self.found[True].items()}
        self.now = self.found[False] + self.found[True]
        self._check_file(saved)
        unclosed = self.db.execute(f"SELECT seq FROM groups WHERE state NOT IN {CLOSED}")
        mark = Mark(last, seq, durable, [seq for (seq,) in unclosed], tally)
        return self._report(msgspec.json.encode(mark).decode())

    def _count(self, table: str, is_closed: bool, state: str, found: int, row: Row) -> None:
        """Count a row and verify its checksum."""
        tally = self.found[is_closed]
        tally[f"{table} {state}"] += 1
        if table == "groups" and state == "filtered":
            tally[f"reason {row[6]}"] += 1
        if self.has_sums:
            tally[f"sum {table}"] += found or 0
            if schema.checksum(*row) != found:
                name = str(row[0] + 1 if table == "steps" else row[0])
                self.problems["broken"][f"{table} differ from their checksum"].append(name)

    def _check(self, state: str, row: Row, step: int | None, *kept: object) -> None:
        """Compare columns and payload of a trajectory with its header, and count its tokens."""
        name = str(row[0])
        is_closed = state in CLOSED
        is_unusable, found, payload = kept
        tally = self.found[is_closed]
        what = ""
        try:
            h = decode_header(row[10])
            if columns(h) != row[:10]:
                what = "trajectories whose columns differ from their header"
            elif payload is None:
                if not (is_closed and (step or 0) < self.dropped):
                    what = "payloads missing without a drop"
            elif not isinstance(payload, bytes) or (
                self.has_sums and schema.checksum(name, payload=payload) != found
            ):
                what = "payloads differ from their checksum"
            elif is_unusable:
                pass
            elif different := find_mismatch(h, payload := whole_payload(self.db, payload)):
                what = f"payloads differ from their header ({different})"
            else:
                self._count_turns(payload, tally)
            tally[f"tokens {state}"] += row[5]
            tally["newest"] = max(tally["newest"], h.newest_version + 1)
            if step is not None and state in IN_STATE["trained"]:
                tally["trained"] += 1
                tally["mixed"] += h.oldest_version != h.newest_version
                tally["interrupted"] += h.interruptions
                tally["staleness"] = max(tally["staleness"], step - h.oldest_version)
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            what = f"trajectories that cannot be read ({error})"
        if what:
            self.problems["broken"][what].append(name)

    @staticmethod
    def _count_turns(payload: bytes, tally: Counter[str]) -> None:
        """Count the turns of a payload, the origin of their prompts' tokens, and branches."""
        for turn in chain(*[segment.turns for segment in decode_segments(payload)]):
            tally["turns"] += 1
            tally["reused"] += turn.reused
            tally["new"] += turn.start - turn.reused
            tally["sampled"] += turn.length
            if turn.reason not in ("", "first"):
                tally[f"branch {turn.reason}"] += 1

    def _check_file(self, saved: int) -> None:
        """Compare the tables with `heads` and the newest checkpoint; if full, check the file."""
        for table, rows, total in self.db.execute("SELECT name, rows, sum FROM heads"):
            here = sum(self._named(f"{table} ").values())
            found = self.now[f"sum {table}"]
            if (here, found & schema.CHECKSUM_MASK) != (rows, total):
                kind = "lost" if here < rows else "repeated" if here > rows else "broken"
                what = f"{table}: {rows} rows were written, {here} are in the file"
                self.problems[kind][what] = []
        (steps,) = self.db.execute("SELECT IFNULL(MAX(step) + 1, 0) FROM main.steps").fetchone()
        if steps < saved:
            what = f"newest transactions: a checkpoint has {saved} steps, the ledger {steps}"
            self.problems["lost"][what + " (was ledger.sqlite-wal deleted?)"] = []
        if self.is_whole:
            for (line,) in self.db.execute(f"PRAGMA main.integrity_check({SHOWN})"):
                if line != "ok":
                    self.problems["broken"][f"the file is damaged: {line}"] = []

    def _named(self, prefix: str) -> dict[str, int]:
        return {k.removeprefix(prefix): n for k, n in self.now.items() if k.startswith(prefix)}

    def _report(self, mark: str) -> AuditReport:
        now, (checkpoints,) = self.now, *self.db.execute("SELECT COUNT(*) FROM checkpoints")
        return AuditReport(
            groups=Balance.of(self._named("groups ")),
            tokens=Balance.of(self._named("tokens ")),
            filtered_by_reason=self._named("reason "),
            failures_by_class=self._named("failures "),
            steps=now["steps "],
            checkpoints=checkpoints,
            trained_trajectories=now["trained"],
            mixed_version_trajectories=now["mixed"],
            interrupted=now["interrupted"],
            weight_versions=max(each["newest"] for each in self.found),
            max_staleness=max(each["staleness"] for each in self.found),
            turns=self._turns(),
            notes=[*self._notes()],
            mark=mark,
            **{k: [_line(*each) for each in v.items()] for k, v in self.problems.items()},
        )

    def _turns(self) -> str:
        """Return the line of the certified turns; "" without any."""
        now = self.now
        found = Counter(self._named("branch "))
        if not now["turns"]:
            return ""
        reasons = ", ".join([f"{reason} {count}" for reason, count in found.most_common()])
        branches = f"{found.total()} branches" + (f" ({reasons})" if reasons else "")
        wrong = [len(v) for k, v in self.problems["broken"].items() if "(receipt:" in k]
        checked = f"{now['turns']} turns certified, {sum(wrong)} trajectories wrong"
        prompts = f"prompt tokens: {now['reused']} reused, {now['new']} new"
        return f"{checked}: {now['sampled']} sampled tokens; {prompts}; {branches}"

    def _notes(self) -> Iterator[str]:
        if self.dropped:
            yield f"payloads of steps 1 to {self.dropped} were dropped (datapipe.keep_payloads)"
        if not self.has_sums:
            yield "no checksums: an older AReaLite wrote this ledger; payloads match their headers"
        sql = f"SELECT group_id, substr(reason, 10) FROM main.groups WHERE {UNUSABLE}"
        if names := [f"{group} ({what})" for group, what in self.db.execute(sql)]:
            yield _line("groups set aside, because no rank could train them", names)
        if self.mark.step:
            yield f"steps 1 to {self.mark.step} were audited during the run, and not again now"


def _line(what: str, names: list[str]) -> str:
    shown = f"{', '.join(names[:SHOWN])}{' …' if names[SHOWN:] else ''}"
    return f"{len(names)} {what}: {shown}" if names else what


def _unreadable(path: Path) -> str:
    """Return a sentence with the last readable row of each damaged table."""
    found = list[str]()
    with suppress(sqlite3.Error), closing(connect(path, read_only=True)) as db:
        db.execute("PRAGMA writable_schema = ON")  # reads what is left of a truncated file
        for table, columns in schema.COVERED.items():
            last = "the beginning"
            try:
                for row in db.execute(f"SELECT {columns}, * FROM {table}"):
                    last = row[0]
            except sqlite3.Error:
                found.append(f"{table} after {last}")
    return f" Unreadable: {', '.join(found) or 'an index'}."
