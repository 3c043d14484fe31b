"""Audits a ledger: no sample is lost, none is repeated, no trained token is too old.

The audit reads only the file, and the configs beside it if they exist. The run may be active, ended
or copied. The audit reads all rows and payloads, or only those after the *mark*. The datapipe
stores the mark in the ledger: all records before it passed an audit.
"""

import math
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from arealite.api.hooks import OnRow
from arealite.api.payloads import Payload
from arealite.api.trajectory import TrajectoryHeader
from arealite.api.trajectory_tree import TrajectoryTree
from arealite.base import config as base_config
from arealite.base.errors import UserError
from arealite.base.trial_files import RunPaths
from arealite.ext.audit.audit_queries import CHECKS, CLOSED, ENDS, ROWS, UNUSABLE
from arealite.ext.audit.audit_report import IN_STATE, AuditReport, LedgerBalance
from arealite.ext.served_policy.proof_file import proof_notes, sent_notes
from arealite.system.ledger import schema
from arealite.system.ledger.ledger import columns, connect, decode_header, read_any_format
from arealite.system.ledger.payload_checks import decode_checked

SHOWN = 5
"""Maximum number of ids in one line of the report."""
PROGRESS_EVERY = 64
"""Number of trajectories between two calls of the progress callback."""
COVERED_NAMES = {table: columns.split(", ") for table, columns in schema.COVERED.items()}
"""`schema.COVERED` as lists of names."""
HEADER_COLUMNS = [name for name in COVERED_NAMES["trajectories"] if name != "header"]
"""Columns of a trajectory that repeat fields of its header, in the order of `columns`."""


@dataclass(frozen=True, kw_only=True)
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
        if any(ppo["staleness_policy"] == "mask" for ppo in starts):
            max_staleness = math.inf
        else:
            max_staleness = max(ppo["max_staleness"] for ppo in starts)
        allowing = [ppo for ppo in starts if ppo.get("partial_group") == "min_size"]
        attempts = min((ppo["max_attempts"] for ppo in allowing), default=0)
        return cls(max_staleness=max_staleness, attempts=attempts)


class Mark(msgspec.Struct, frozen=True, kw_only=True):
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


def audit(
    path: Path,
    *,
    new_only: bool = False,
    on_row: OnRow | None = None,
) -> AuditReport:
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
    names = [folder.name.removeprefix("step-") for folder in paths.checkpoints.glob("step-*")]
    saved_steps = [int(name) for name in names if name.isdecimal()]
    try:
        with closing(connect(path, read_only=True)) as db:
            # A tampered row may not be UTF-8.
            db.text_factory = partial(str, encoding="utf-8", errors="replace")
            read_any_format(db)
            db.execute("BEGIN")  # one snapshot for all queries
            report = Audit(db, new_only).run(
                Guarantees.of(paths),
                saved=max(saved_steps, default=0),
                on_row=on_row,
            )
            weights = [*sent_notes(_sent_records(db)), *proof_notes(path.parent)]
            return replace(report, notes=[*report.notes, *weights])
    except sqlite3.Error as error:
        raise UserError(
            f"{path} cannot be read as a ledger: {error}.{_unreadable(path)} "
            "Restore a copy, or export the newest checkpoint and begin another trial with it."
        ) from error


def _sent_records(db: sqlite3.Connection) -> dict[int, str]:
    """Return the records of published weights by version; {} for an older ledger."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'versions'").fetchone():
        return {}
    return dict(db.execute("SELECT version, proof FROM versions WHERE proof > '' ORDER BY version"))


class Audit:
    """An audit of one snapshot. Temporary views hide the records before the mark."""

    def __init__(self, db: sqlite3.Connection, new_only: bool) -> None:
        self.db = db
        self.is_whole = not new_only
        self.mark = Mark()
        meta = dict(db.execute("SELECT key, value FROM meta"))
        if new_only:
            with suppress(msgspec.MsgspecError):  # none yet
                self.mark = msgspec.json.decode(meta.get("audited", ""), type=Mark)
        self.dropped = int(meta.get("dropped", 0))
        self.has_named_states = meta.get("trainer") == "session"
        """Whether the user has named the checkpoints: "step-7" may have any number of steps."""
        self.open_counts = Counter[str]()
        """Counts and sums of open records, by name."""
        self.final_counts = Counter(self.mark.tally)
        """Counts and sums of final records; only a roll-back changes these records."""
        self.problems = defaultdict[str, dict[str, list[str]]](lambda: defaultdict(list))
        """By field of the report and text of the problem: ids."""
        self._create_views()

    def _create_views(self) -> None:
        """Create a view over each table with only the records after the mark."""
        mark = self.mark
        seqs = ", ".join(map(str, mark.open))
        newer = {
            "groups": f"seq >= {mark.seq} OR seq IN ({seqs})",
            "steps": f"step >= {mark.step}",
            "failures": "group_id IN (SELECT group_id FROM groups)",
            "trajectories": f"rowid > {mark.row} OR group_id IN "
            f"(SELECT group_id FROM main.groups WHERE seq IN ({seqs}))",
        }
        for table, is_newer in newer.items():
            condition = is_newer if mark.row else "true"
            self.db.execute(
                f"CREATE TEMP VIEW {table} AS SELECT * FROM main.{table} WHERE {condition}"
            )

    def run(
        self,
        guarantees: Guarantees,
        saved: int,
        on_row: OnRow | None,
    ) -> AuditReport:
        """Check all rules.

        Args:
            guarantees: The guarantees of the run.
            saved: Step of the newest checkpoint folder; 0 without one.
            on_row: Progress callback, as in `audit`.
        """
        last_row, durable_step, next_seq = self.db.execute(ENDS).fetchone()
        for table in ROWS:
            for row in self._rows(table, durable_step):
                self._count(table, row)
                if table != "trajectories":
                    continue
                self._check_trajectory(row)
                if on_row and row["n"] % PROGRESS_EVERY == 0:
                    on_row(row["n"], last_row)
        self._check_rules(guarantees)
        self.now = self.open_counts + self.final_counts
        self._check_heads()
        self._check_file(saved)
        mark = self._new_mark(last_row, durable_step, next_seq)
        return self._report(msgspec.json.encode(mark).decode())

    def _rows(self, table: str, durable_step: int) -> sqlite3.Cursor:
        """Return the rows of a table, with columns by name (`ROWS`)."""
        cursor = self.db.cursor()
        cursor.row_factory = sqlite3.Row
        query = ROWS[table].format(columns=schema.COVERED[table], durable=durable_step)
        return cursor.execute(query)

    def _counts_of(self, row: sqlite3.Row) -> Counter[str]:
        return self.final_counts if row["is_final"] else self.open_counts

    def _count(self, table: str, row: sqlite3.Row) -> None:
        """Count a row and verify its checksum."""
        counts = self._counts_of(row)
        label = row["label"]
        counts[f"{table} {label}"] += 1
        if table == "groups" and label == "filtered":
            counts[f"reason {row['reason']}"] += 1
        row_sum = row["row_sum"]
        counts[f"sum {table}"] += row_sum or 0
        covered = [row[name] for name in COVERED_NAMES[table]]
        if schema.checksum(*covered) != row_sum:
            row_id = row["step"] + 1 if table == "steps" else covered[0]
            self.problems["broken"][f"{table} differ from their checksum"].append(str(row_id))

    def _check_trajectory(self, row: sqlite3.Row) -> None:
        """Compare columns and payload of a trajectory with its header, and count its tokens."""
        try:
            header = decode_header(row["header"])
            problem = self._trajectory_problem(row, header)
            self._count_trajectory(row, header)
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            problem = f"trajectories that cannot be read ({error})"
        if problem:
            self.problems["broken"][problem].append(str(row["trajectory_id"]))

    def _trajectory_problem(self, row: sqlite3.Row, header: TrajectoryHeader) -> str:
        """Return the problem of a trajectory; "" if it has none. Counts the turns of its payload.

        Raises:
            ValueError: the payload cannot be read; also TypeError and MsgspecError.
        """
        if columns(header) != tuple(row[name] for name in HEADER_COLUMNS):
            return "trajectories whose columns differ from their header"
        turns = row["turns"]
        if turns is None:
            is_dropped = row["is_final"] and (row["step"] or 0) < self.dropped
            return "" if is_dropped else "payloads missing without a drop"
        prompt = row["prompt_tokens"]
        if not (isinstance(turns, bytes) and isinstance(prompt, bytes)):
            return "payloads that are no bytes"
        payload = Payload(prompt=prompt, turns=turns)
        if row["is_unusable"]:
            is_changed = not turns or header.digest not in (b"", payload.digest)
            return "payloads differ from their digest" if is_changed else ""
        tree, mismatch = decode_checked(header, payload)
        if mismatch:
            return f"payloads differ from their header ({mismatch})"
        self._count_turns(tree, self._counts_of(row))
        return ""

    def _count_trajectory(self, row: sqlite3.Row, header: TrajectoryHeader) -> None:
        """Count the tokens of a trajectory; if it is trained, also its versions."""
        counts = self._counts_of(row)
        state = row["label"]
        step = row["step"]
        counts[f"tokens {state}"] += row["tokens"]
        counts["newest"] = max(counts["newest"], header.newest_version + 1)
        if step is None or state not in IN_STATE["trained"]:
            return
        counts["trained"] += 1
        counts["mixed"] += header.oldest_version != header.newest_version
        counts["interrupted"] += header.interruptions
        counts["staleness"] = max(counts["staleness"], step - header.oldest_version)

    @staticmethod
    def _count_turns(tree: TrajectoryTree, counts: Counter[str]) -> None:
        """Count the certified turns, the origin of their prompts' tokens, and branches."""
        for start, turn in zip(tree.starts, tree.turns, strict=True):
            if not turn.prompt_digest:
                continue
            counts["turns"] += 1
            counts["reused"] += turn.reused
            counts["new"] += start - turn.reused
            counts["sampled"] += len(turn.ids) // 4
            if turn.reason not in ("", "first"):
                counts[f"branch {turn.reason}"] += 1

    def _check_rules(self, guarantees: Guarantees) -> None:
        """Run the queries of `CHECKS`, and note the ids that they return."""
        parameters = vars(guarantees) | {"seq": self.mark.seq, "row": self.mark.row}
        for field, checks in CHECKS.items():
            for problem, query in checks.items():
                names = [str(name) for (name,) in self.db.execute(query, parameters)]
                if names:
                    self.problems[field][problem.format(**parameters)] = names

    def _check_heads(self) -> None:
        """Compare the number of rows and the checksums of each table with `heads`."""
        for table, num_written, written_sum in self.db.execute("SELECT name, rows, sum FROM heads"):
            num_rows = sum(self._named(f"{table} ").values())
            row_sum = self.now[f"sum {table}"] & schema.CHECKSUM_MASK
            if (num_rows, row_sum) == (num_written, written_sum):
                continue
            field = "broken"
            if num_rows != num_written:
                field = "lost" if num_rows < num_written else "repeated"
            problem = f"{table}: {num_written} rows were written, {num_rows} are in the file"
            self.problems[field][problem] = []

    def _check_file(self, saved: int) -> None:
        """Compare the steps with the newest checkpoint; if the audit is whole, check the file."""
        query = "SELECT IFNULL(MAX(step) + 1, 0) FROM main.steps"
        (num_steps,) = self.db.execute(query).fetchone()
        if num_steps < saved and not self.has_named_states:
            self.problems["lost"][
                f"newest transactions: a checkpoint has {saved} steps, the ledger {num_steps} "
                "(was ledger.sqlite-wal deleted?)"
            ] = []
        if not self.is_whole:
            return
        for (line,) in self.db.execute(f"PRAGMA main.integrity_check({SHOWN})"):
            if line != "ok":
                self.problems["broken"][f"the file is damaged: {line}"] = []

    def _new_mark(self, last_row: int, durable_step: int, next_seq: int) -> Mark:
        """Return the mark after this audit."""
        query = f"SELECT seq FROM groups WHERE state NOT IN {CLOSED}"
        open_seqs = [seq for (seq,) in self.db.execute(query)]
        tally = {name: count & schema.CHECKSUM_MASK for name, count in self.final_counts.items()}
        return Mark(
            row=last_row,
            seq=next_seq,
            step=durable_step,
            open=open_seqs,
            tally=tally,
        )

    # ------------------------------------------------------------ the report

    def _named(self, prefix: str) -> dict[str, int]:
        """Return the counts whose name begins with a prefix, by the remaining name."""
        return {
            name.removeprefix(prefix): count
            for name, count in self.now.items()
            if name.startswith(prefix)
        }

    def _report(self, mark: str) -> AuditReport:
        now = self.now
        (checkpoints,) = self.db.execute("SELECT COUNT(*) FROM checkpoints").fetchone()
        return AuditReport(
            groups=LedgerBalance.of(self._named("groups ")),
            tokens=LedgerBalance.of(self._named("tokens ")),
            filtered_by_reason=self._named("reason "),
            failures_by_class=self._named("failures "),
            steps=now["steps "],
            checkpoints=checkpoints,
            trained_trajectories=now["trained"],
            mixed_version_trajectories=now["mixed"],
            interrupted=now["interrupted"],
            weight_versions=max(self.open_counts["newest"], self.final_counts["newest"]),
            max_staleness=max(self.open_counts["staleness"], self.final_counts["staleness"]),
            lost=self._problem_lines("lost"),
            repeated=self._problem_lines("repeated"),
            broken=self._problem_lines("broken"),
            turns=self._turns(),
            notes=[*self._notes()],
            mark=mark,
        )

    def _problem_lines(self, field: str) -> list[str]:
        return [_line(problem, names) for problem, names in self.problems[field].items()]

    def _turns(self) -> str:
        """Return the line of the certified turns; "" without any."""
        now = self.now
        if not now["turns"]:
            return ""
        counts = Counter(self._named("branch "))
        branches = f"{counts.total()} branches"
        if counts:
            reasons = [f"{reason} {count}" for reason, count in counts.most_common()]
            branches += f" ({', '.join(reasons)})"
        num_wrong = 0
        for problem, names in self.problems["broken"].items():
            if "(receipt:" in problem:
                num_wrong += len(names)
        return (
            f"{now['turns']} turns certified, {num_wrong} trajectories wrong: "
            f"{now['sampled']} sampled tokens; "
            f"prompt tokens: {now['reused']} reused, {now['new']} new; "
            f"{branches}"
        )

    def _notes(self) -> Iterator[str]:
        if self.dropped:
            yield f"payloads of steps 1 to {self.dropped} were dropped (datapipe.keep_payloads)"
        query = f"SELECT group_id, substr(reason, 10) FROM main.groups WHERE {UNUSABLE}"
        names = [f"{group_id} ({reason})" for group_id, reason in self.db.execute(query)]
        if names:
            yield _line("groups set aside, because no rank could train them", names)
        if self.mark.step:
            yield f"steps 1 to {self.mark.step} were audited during the run, and not again now"


def _line(problem: str, names: list[str]) -> str:
    """Return a line with the number of names and the first of them; the problem without names."""
    if not names:
        return problem
    more = " …" if names[SHOWN:] else ""
    return f"{len(names)} {problem}: {', '.join(names[:SHOWN])}{more}"


def _unreadable(path: Path) -> str:
    """Return a sentence with the last readable row of each damaged table."""
    damaged = list[str]()
    with suppress(sqlite3.Error), closing(connect(path, read_only=True)) as db:
        db.execute("PRAGMA writable_schema = ON")  # reads what is left of a truncated file
        for table, covered in schema.COVERED.items():
            last_id = "the beginning"
            try:
                for row_id, *_ in db.execute(f"SELECT {covered}, * FROM {table}"):
                    last_id = row_id
            except sqlite3.Error:
                damaged.append(f"{table} after {last_id}")
    return f" Unreadable: {', '.join(damaged) or 'an index'}."
