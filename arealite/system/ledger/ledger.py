"""Stores a trial in one SQLite file: the state of every group, every trajectory, every step.

SQLite transactions keep the file consistent after kill -9 at any instant. Viewers, audit and replay
read the file while the run is active or after it ended.

    group: offered → leased → complete → filtered(reason) | batched(step) → trained → durable

`seq` numbers the groups in the order of the dataset, so the number of rows in `groups` is the
position in the dataset. A batched group that is rolled back to complete keeps its `step` and
`place`: the same groups fill that step again, in the same order. Writes are queued in memory, and
`execute` commits them in one transaction, so the file equals the state in memory at one moment. A
group is written once per transaction, and one statement writes many rows, because sqlite3 releases
the GIL at each statement.
"""

import json
import os
import sqlite3
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from arealite.api.hooks import LedgerFormat
from arealite.api.payloads import Payload
from arealite.api.rollout_messages import Failure, Lease, TurnHeader
from arealite.api.trainer_messages import StepReport
from arealite.api.trajectory import TrajectoryHeader
from arealite.api.turns import digest
from arealite.base import entries, log
from arealite.base.errors import InvariantError, UserError
from arealite.system.ledger import schema
from arealite.system.ledger.group import Group

logger = log.get(__name__)

LOG_BYTES = 128 << 20
"""Size of the write-ahead log from which it is truncated, even if readers delay that."""
CHECK_LOG_EVERY = 16
"""Number of transactions between two checks of the log's size."""
READERS_MS = 200
"""Time to wait for readers if the log has LOG_BYTES; it grows with the size of the log."""
MAX_READERS_MS = 2000
"""Maximum time to wait for readers."""
BUSY_MS = 10_000
"""Time for which a connection waits for a lock."""
ROWS = 32
"""Maximum number of rows in one statement."""
PRAGMAS = "journal_mode=WAL", "synchronous=NORMAL", "wal_autocheckpoint=8192", "secure_delete=OFF"
"""NORMAL is safe against kill without fsync. Some builds overwrite deleted data by default."""
_encode = msgspec.msgpack.Encoder().encode
decode_header = msgspec.msgpack.Decoder(TrajectoryHeader).decode
decode_turn = msgspec.msgpack.Decoder(TurnHeader).decode

Statement = tuple[str, tuple[Any, ...]]


class Ledger:
    """The file and its queue of writes. Other methods queue writes; `execute` commits them."""

    def __init__(self, path: Path, *, fingerprint: dict[str, str]) -> None:
        """Open or create the ledger at `path`.

        Args:
            path: The file; its folder is created.
            fingerprint: Names and values that must not change within a trial.

        Raises:
            UserError: the file cannot be written, has another schema version, or was created with
                another fingerprint.
        """
        self.path = path
        self._queue: list[Statement] = []
        self._groups: dict[int, Group] = {}
        """By seq: groups that changed since the last transaction."""
        self._trajectories: list[tuple[object, ...]] = []
        self._prompts: dict[tuple[str, bytes], bytes] = {}
        """Queued prompts by (group id, digest)."""
        self._log_limit = LOG_BYTES
        self._transactions = 0
        self._busy_s = 0.0
        """Seconds spent in transactions since the last `take_busy_s`."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with ExitStack() as on_error:
                self.connection = connect(path)
                on_error.callback(self.connection.close)
                self._prepare(fingerprint)
                on_error.pop_all()
        except (OSError, sqlite3.Error) as error:
            raise UserError(
                f"Cannot use the ledger {path}: {error}. Make the folder writable or free the disk."
            ) from error

    def _prepare(self, fingerprint: dict[str, str]) -> None:
        expected = {"schema": schema.SCHEMA_VERSION, **fingerprint}
        db = self.connection
        is_new = db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is None
        if is_new:
            db.executescript("BEGIN IMMEDIATE;" + schema.SCHEMA)
            db.executemany("INSERT INTO meta VALUES (?, ?)", expected.items())
            tables = [(table,) for table in schema.COVERED]
            db.executemany("INSERT INTO heads VALUES (?, 0, 0)", tables)
            db.execute("COMMIT")
        stored = dict(db.execute("SELECT key, value FROM meta").fetchall())
        check_format(stored.get("schema"), self.path, "use it, or choose another trial_name")
        check_identity(stored, fingerprint, self.path)
        db.create_function("checksum", -1, schema.checksum, deterministic=True)
        for table in schema.COVERED:
            db.executescript(schema.triggers(table))
        db.execute(f"DELETE FROM checkpoints WHERE NOT {schema.VALID_CHECKPOINT}")
        self.boot = int(stored.get("boot", "0")) + 1
        self.set_meta("boot", str(self.boot))
        self.commit()

    def open_groups(self, make: Callable[[int, int, int], Group]) -> Iterator[Group]:
        """Yield the groups that are neither trained nor filtered, in the order of their batch.

        Args:
            make: Called with seq, epoch and row; returns the group without its state.
        """
        rows = self.connection.execute(
            "SELECT seq, epoch, row, leases, state, step, place FROM groups "
            "WHERE state NOT IN ('filtered', 'trained', 'durable') ORDER BY place, seq"
        ).fetchall()
        for seq, epoch, row, leases, state, step, place in rows:
            group = make(seq, epoch, row)
            group.state = state
            group.step = step
            group.place = place
            for lease_id, worker_id, members, version in json.loads(leases):
                group.owners[lease_id] = worker_id
                group.leases[lease_id] = Lease(
                    lease_id=lease_id,
                    group_id=group.group_id,
                    split="train",
                    task=group.task,
                    members=members,
                    version=version,
                )
            self._load_episodes(group)
            yield group

    def _load_episodes(self, group: Group) -> None:
        """Load the trajectories, failures and turns of a group."""
        db = self.connection
        key = (group.group_id,)
        query = "SELECT header FROM trajectories WHERE group_id = ? ORDER BY member, seat"
        for (encoded_header,) in db.execute(query, key):
            header = decode_header(encoded_header)
            group.finished.setdefault(header.member, []).append(header)
        query = "SELECT member, lease_id, class FROM failures WHERE group_id = ?"
        group.failures = db.execute(query, key).fetchall()
        for (encoded_turn,) in db.execute("SELECT header FROM turns WHERE group_id = ?", key):
            turn = decode_turn(encoded_turn)
            turns = group.turns.setdefault(turn.member, {})
            turns[turn.seat, turn.index] = turn

    # ------------------------------------------------------------ writing

    def _put(self, sql: str, *values: object) -> None:
        self._queue.append((sql, values))

    def set_meta(self, key: str, value: str) -> None:
        """Set a key of the table `meta`."""
        self._put("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, value)

    def put_group(self, group: Group) -> None:
        """Write a group, in its state at the time of the next transaction."""
        self._groups[group.seq] = group

    def add_trajectory(self, header: TrajectoryHeader, payload: Payload) -> None:
        """Write a trajectory; ignore it if its id is stored already."""
        if not header.digest:  # its worker computed none
            header = msgspec.structs.replace(header, digest=payload.digest)
        prompt_digest = digest(payload.prompt)
        self._prompts[header.group_id, prompt_digest] = payload.prompt
        covered = (*columns(header), _encode(header))
        row = (*covered, prompt_digest, payload.turns, schema.checksum(*covered))
        self._trajectories.append(row)

    def add_turn(self, group_id: str, turn: TurnHeader, payload: bytes) -> None:
        """Write a turn of an unfinished episode; replace a stored turn of the same index."""
        self._put(
            "INSERT OR REPLACE INTO turns VALUES (?, ?, ?, ?, ?, ?)",
            group_id,
            turn.member,
            turn.seat,
            turn.index,
            _encode(turn),
            payload,
        )

    def delete_turns(self, group_id: str, member: int) -> None:
        """Delete the stored turns of an episode."""
        self._put("DELETE FROM turns WHERE group_id = ? AND member = ?", group_id, member)

    def add_failure(
        self,
        group_id: str,
        member: int,
        lease_id: str,
        failure: Failure,
    ) -> None:
        """Write a failed attempt; ignore it if one of this member and lease is stored already."""
        row = schema.with_checksum(
            group_id,
            member,
            lease_id,
            failure.failure_class,
            failure.detail,
        )
        self._queue += _many(schema.PUT_FAILURE, [row])

    def train(self, report: StepReport) -> None:
        """Write the report of a trained step, and mark its groups as trained."""
        row = schema.with_checksum(
            report.step,
            json.dumps(report.trained),
            json.dumps(report.metrics),
            report.ranks,
            report.fingerprint,
        )
        self._queue += _many(schema.PUT_STEP, [row])
        self._change("step = ? AND state = 'batched'", report.step, state="'trained'")

    def checkpoint(self, step: int, path: str) -> None:
        """Write a checkpoint that contains all steps before `step`; mark them as durable."""
        self._put("INSERT OR REPLACE INTO checkpoints VALUES (?, ?)", step, path)
        self._change("state = 'trained' AND step < ?", step, state="'durable'")

    def drop_payloads(self, checkpoints: int) -> bool:
        """Drop the payloads of the oldest step with payloads; return False if there is none.

        Steps after the oldest of the newest `checkpoints` checkpoints are kept. One call drops one
        step, because other writes wait for the transaction. SQLite reuses the space. No other
        thread may use the connection meanwhile.
        """
        step = meta_number(self.connection, "dropped")  # the first step with payloads
        query = "SELECT step FROM checkpoints ORDER BY step DESC LIMIT 1 OFFSET ?"
        oldest_kept = self.connection.execute(query, (checkpoints - 1,)).fetchone()
        if oldest_kept is None:
            return False
        (kept_step,) = oldest_kept
        if step >= kept_step:
            return False
        for sql in schema.DROP_PAYLOADS:
            self._put(sql, step, step, step)
        self.set_meta("dropped", str(step + 1))
        return True

    def roll_back(self, step: int) -> None:
        """Undo batches from `step` on; their groups are complete again and keep step and place."""
        is_undone = "step >= ? AND state IN ('batched', 'trained', 'durable')"
        self._change(is_undone, step, state="'complete'")
        self._put("DELETE FROM steps WHERE step >= ?", step)
        self._put("DELETE FROM checkpoints WHERE step > ?", step)
        self._put("DELETE FROM evals WHERE eval_id > ?", step)
        self._put("DELETE FROM versions WHERE version > ?", step)
        self._put("DELETE FROM meta WHERE key = 'version' AND CAST(value AS INTEGER) > ?", step)
        # An audit mark beyond the remaining steps is no longer valid.
        is_beyond = "json_extract(value, '$.step') > ?"
        self._put(f"DELETE FROM meta WHERE key = 'audited' AND {is_beyond}", step)

    def mark_audited(self, mark: str) -> None:
        """Write the mark of an audit, unless its newest checkpoint was rolled back meanwhile."""
        is_valid = "json_extract(mark, '$.step') <= (SELECT IFNULL(MAX(step), 0) FROM checkpoints)"
        selected = f"SELECT 'audited', mark FROM (SELECT ? AS mark) WHERE {is_valid}"
        self._put(f"INSERT OR REPLACE INTO meta {selected}", mark)

    def add_version(self, version: int, proof: str) -> None:
        """Write a published version, with the record of its weights; "" without one."""
        self._put("INSERT OR REPLACE INTO versions VALUES (?, ?)", version, proof or None)

    def clear_planned_steps(self) -> None:
        """Clear step and place of rolled-back groups, because the batch size was changed."""
        self._change("state = 'complete' AND step NOTNULL", step="NULL", place="NULL")

    def _change(self, condition: str, *parameters: object, **changes: str) -> None:
        """Set columns of groups to SQL expressions, and update their checksums.

        Args:
            condition: SQL condition; the groups to change.
            parameters: Values of the placeholders in the condition.
            changes: By column: its new value, as an SQL expression.
        """
        names = schema.COVERED["groups"].split(", ")
        covered = ", ".join(changes.get(name, name) for name in names)
        assignments = ", ".join(f"{name} = {new}" for name, new in changes.items())
        self._put(
            f"UPDATE groups SET {assignments}, sum = checksum({covered}) WHERE {condition}",
            *parameters,
        )

    def add_eval(self, eval_id: int, metrics: dict[str, float]) -> None:
        """Write the scores of an evaluation."""
        self._put("INSERT OR REPLACE INTO evals VALUES (?, ?)", eval_id, json.dumps(metrics))

    def take(self) -> list[Statement]:
        """Return the queued writes for `execute`, and clear the queue."""
        queue = self._queue
        self._queue = []
        groups = self._groups
        self._groups = {}
        trajectories = self._trajectories
        self._trajectories = []
        prompts = self._prompts
        self._prompts = {}
        rows = [_row(group) for group in groups.values()]
        prompt_rows = [(*key, tokens) for key, tokens in prompts.items()]
        statements = [*_many(schema.PUT_GROUPS, rows)]
        statements += _many(schema.PUT_PROMPTS, prompt_rows)
        statements += _many(schema.PUT_TRAJECTORIES, trajectories)
        return statements + queue

    def execute(self, statements: Iterable[Statement]) -> None:
        """Commit writes in one transaction.

        Raises:
            InvariantError: the file cannot be written; the transaction was rolled back.
        """
        db = self.connection
        begin = time.perf_counter()
        try:
            db.execute("BEGIN IMMEDIATE")
            for sql, parameters in statements:
                db.execute(sql, parameters)
            db.execute("COMMIT")
        except sqlite3.Error as error:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise InvariantError(
                f"cannot write the ledger {self.path}: {error}. No acknowledged result is lost: "
                "free the disk or repair its permissions, then start the same trial again."
            ) from error
        self._transactions += 1
        if self._transactions % CHECK_LOG_EVERY == 0:
            self._limit_log()
        self._busy_s += time.perf_counter() - begin

    def take_busy_s(self) -> float:
        """Return the time spent in transactions since the last call, in seconds."""
        busy_s = self._busy_s
        self._busy_s = 0.0
        return busy_s

    def _limit_log(self) -> None:
        """Truncate a large write-ahead log: SQLite cannot reuse it while readers overlap."""
        size = os.stat(f"{self.path}-wal").st_size
        if size < self._log_limit:
            return
        timeout_ms = min(READERS_MS * size // LOG_BYTES, MAX_READERS_MS)
        is_blocked = True
        self.connection.execute(f"PRAGMA busy_timeout = {timeout_ms}")
        with suppress(sqlite3.Error):  # committed data is safe in any case
            (is_blocked, *_) = self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        self.connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
        self._log_limit = 2 * size if is_blocked else LOG_BYTES
        if is_blocked:
            logger.warning("a reader blocks truncation of the ledger's log", megabytes=size >> 20)

    def commit(self) -> None:
        """Commit all queued writes in the calling thread."""
        self.execute(self.take())

    def close(self) -> None:
        """Close the file."""
        self.connection.close()


def check_format(schema_version: str | None, path: object, way_out: str) -> None:
    """Check that a ledger or a checkpoint has the format of this version.

    Args:
        schema_version: The key `schema` of the table `meta`.
        path: The run's folder or file, for the error.
        way_out: What to do, for the error.

    Raises:
        UserError: it has another format.
    """
    if schema_version != schema.SCHEMA_VERSION:
        raise UserError(
            f"{path} was written by another version of AReaLite "
            f"(format {schema_version}, now {schema.SCHEMA_VERSION}): {way_out}."
        )


def check_identity(
    stored: Mapping[str, str], expected: Mapping[str, str], path: Path, hint: str = ""
) -> None:
    """Check that a run has the names and values with which it was started.

    Args:
        stored: The table `meta`, or the identity of a checkpoint.
        expected: The present names and values.
        path: The run's folder or file, for the error.
        hint: A further way out, for the error.

    Raises:
        UserError: a value differs.
    """
    for key, now in expected.items():
        before = stored.get(key)
        if before != now:
            others = "or choose another trial_name"
            if hint:
                others = f"choose another trial_name; or {hint}"
            raise UserError(
                f"{path} was started with {key}={before}, now it is {now}. Use {before}, {others}."
            )


def columns(header: TrajectoryHeader) -> tuple[object, ...]:
    """Return the columns of the table `trajectories` that repeat fields of a header."""
    # As SQLite stores it: a float, and never -0.0.
    reward = None if header.reward is None else header.reward + 0.0
    return (
        header.trajectory_id,
        header.group_id,
        header.member,
        header.seat,
        reward,
        header.num_tokens,
        header.trained_tokens,
        header.oldest_version,
        header.newest_version,
        header.interruptions,
    )


def _row(group: Group) -> tuple[object, ...]:
    """Return a row of the table `groups`, in the order of `schema.PUT_GROUPS`."""
    leases = [
        (lease_id, group.owners[lease_id], lease.members, lease.version)
        for lease_id, lease in group.leases.items()
    ]
    covered = (
        group.group_id,
        group.seq,
        group.task.task_id,
        group.row,
        group.epoch,
        group.state,
        group.reason,
        group.step,
        group.place,
    )
    return (*covered, json.dumps(leases), schema.checksum(*covered))


def _many(sql: str, rows: Sequence[tuple[object, ...]]) -> Iterator[Statement]:
    """Yield statements that write up to ROWS rows each; `sql` has a `{}` for the placeholders."""
    for begin in range(0, len(rows), ROWS):
        chunk = rows[begin : begin + ROWS]
        placeholders = ", ".join("?" * len(chunk[0]))
        all_placeholders = ", ".join([f"({placeholders})"] * len(chunk))
        yield sql.format(all_placeholders), tuple(chain.from_iterable(chunk))


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Open an SQLite file with the ledger's settings; create it unless `read_only`."""
    mode = "ro" if read_only else "rwc"
    has_log = path.with_name(f"{path.name}-wal").exists()  # a writer may have it open
    if read_only and not has_log and not os.access(path.parent, os.W_OK):
        mode += "&immutable=1"  # otherwise a reader needs to write the log's index
    db = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=BUSY_MS / 1000,
        cached_statements=128,
    )
    with ExitStack() as on_error:
        on_error.callback(db.close)
        for pragma in () if read_only else PRAGMAS:
            db.execute(f"PRAGMA {pragma}")
        on_error.pop_all()
    return db


@contextmanager
def open_read_only(path: Path) -> Generator[sqlite3.Connection]:
    """Open a ledger read-only in a `with` block.

    Raises:
        UserError: there is no file, or the file is not a ledger.
    """
    if not os.path.isfile(path):
        raise UserError(f"no ledger at {path}. Name a run folder, as in runs/EXPERIMENT/TRIAL.")
    try:
        with closing(connect(path, read_only=True)) as db:
            yield db
    except sqlite3.Error as error:
        raise UserError(f"{path} cannot be read as a ledger: {error}. Restore it.") from error


def read_any_format(db: sqlite3.Connection) -> None:
    """Create the view `payloads` of an older ledger in the format of this version.

    Raises:
        UserError: the format is too old, or newer than this version.
    """
    stored = dict(db.execute("SELECT key, value FROM meta WHERE key = 'schema'").fetchall())
    schema_version = stored.get("schema")
    if schema_version == schema.SCHEMA_VERSION:
        return
    target = entries.find("ledger_format", schema_version or "")
    if target is None:
        check_format(schema_version, "this run", "read it with that version")
    else:
        create_view: LedgerFormat = entries.load(target)
        create_view(db)


def read_payloads(
    path: Path,
    ids: Sequence[str],
    *,
    dropped: Payload | None = None,
) -> list[Payload]:
    """Read the payloads of trajectories through a new connection.

    Args:
        path: The ledger's file.
        ids: The trajectories, in the order of the result.
        dropped: Returned for a dropped payload; None: a dropped payload is an error.

    Raises:
        InvariantError: a trajectory or its payload is not in the ledger.
    """
    payloads: list[Payload] = []
    query = "SELECT prompt_tokens, turns FROM payloads WHERE trajectory_id = ?"
    with closing(connect(path, read_only=True)) as db:
        read_any_format(db)
        for trajectory_id in ids:
            row = db.execute(query, (trajectory_id,)).fetchone()
            if row is None:
                raise InvariantError(
                    f"trajectory {trajectory_id} is in a batch but not in the ledger {path}"
                )
            prompt, turns = row
            payload = dropped if turns is None else Payload(prompt=prompt, turns=turns)
            if payload is None:
                raise InvariantError(f"the payload of trajectory {trajectory_id} was dropped")
            payloads.append(payload)
    return payloads


def read_turns(path: Path, lease: Lease) -> tuple[list[TurnHeader], list[bytes]]:
    """Read the stored turns of a lease's members: headers and payloads, ordered by member."""
    query = (
        "SELECT header, payload FROM turns WHERE group_id = ? AND member IN "
        "(SELECT value FROM json_each(?)) ORDER BY member, seat, idx"
    )
    with closing(connect(path, read_only=True)) as db:
        rows = db.execute(query, (lease.group_id, json.dumps(lease.members))).fetchall()
    headers = [decode_turn(header) for header, _ in rows]
    payloads = [payload for _, payload in rows]
    return headers, payloads


def meta_number(db: sqlite3.Connection, key: str) -> int:
    """Return a key of the table `meta` as a number; 0 if it is missing."""
    row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return int(row[0]) if row else 0
