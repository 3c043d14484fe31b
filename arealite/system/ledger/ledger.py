"""Keeps the truth of a trial in one SQLite file: every group's state, every trajectory, every step.

A file with transactions rather than a service, because kill -9 at any instant must leave it right,
and viewers, audits and replay read it with nothing of ours running.

    group: offered → leased → complete → filtered(reason) | batched(step) → trained → durable

Groups are offered in order: `seq` counts them, so the dataset's cursor is the number of rows in
`groups`. A batched group keeps its `step` and `place` when it is rolled back to complete: that step
is then filled by the same groups in the same order. Writes are queued in memory and become durable
by `execute`, one transaction for all; so the file is always as memory was at one moment. A group is
written once a transaction, however often it changed, and many rows are one statement: sqlite3 gives
the interpreter's lock away at each.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from arealite.api.rollout_messages import Failure, Lease, TurnHeader
from arealite.api.trainer_messages import StepReport
from arealite.api.trajectory import TrajectoryHeader
from arealite.base import log
from arealite.base.errors import InvariantError, UserError
from arealite.system.ledger import schema
from arealite.system.ledger.group import Group

logger = log.get(__name__)

LOG_BYTES = 128 << 20
"""A write-ahead log of this size is emptied even if readers have to be waited for."""
LOOK_EVERY = 16
"""Transactions between two looks at its size."""
READERS_MS, MAX_READERS_MS = 200, 2000
"""How long a commit waits for them then: at first; longer the larger they have made the log."""
BUSY_MS = 10_000
"""How long a connection waits for a lock."""
ROWS = 32
"""Of one statement."""
_encode = msgspec.msgpack.Encoder().encode
decode_header = msgspec.msgpack.Decoder(TrajectoryHeader).decode
decode_turn = msgspec.msgpack.Decoder(TurnHeader).decode

Statement = tuple[str, tuple[Any, ...]]


class Ledger:
    """The file and its queue of writes. Methods named by verbs queue; `execute` makes durable."""

    def __init__(self, path: Path, *, fingerprint: dict[str, str]) -> None:
        """Open or create the ledger at `path`.

        Raises:
            UserError: it cannot be written, is of another version, or `fingerprint` (what must not
                change within a trial) is not the one it was begun with.
        """
        self.path = path
        self._queue: list[Statement] = []
        self._groups: dict[int, Group] = {}
        """By seq: those that changed."""
        self._trajectories: list[tuple[Any, ...]] = []
        self._log_limit, self._transactions = LOG_BYTES, 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.connection = connect(path)
            self._prepare(fingerprint)
        except (OSError, sqlite3.Error) as error:
            raise UserError(
                f"Cannot use the ledger {path}: {error}. Is the folder writable, the disk full?"
            ) from error

    def _prepare(self, fingerprint: dict[str, str]) -> None:
        expected = {"schema": schema.SCHEMA_VERSION, **fingerprint}
        db = self.connection
        if not db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
            db.executescript("BEGIN IMMEDIATE;" + schema.SCHEMA)
            db.executemany("INSERT INTO meta VALUES (?, ?)", expected.items())
            db.executemany(
                "INSERT INTO heads VALUES (?, 0, 0)", [(table,) for table in schema.COVERED]
            )
            db.execute("COMMIT")
        db.create_function("checksum", -1, schema.checksum, deterministic=True)
        for table in schema.COVERED:
            db.executescript(schema.triggers(table))
        held = dict(db.execute("SELECT key, value FROM meta").fetchall())
        for key, value in expected.items():
            if held.get(key) != value:
                raise UserError(
                    f"The ledger {self.path} was begun with {key}={held.get(key)}, now it is "
                    f"{value}. Restore it, or choose another trial_name."
                )
        db.execute(f"DELETE FROM checkpoints WHERE NOT {schema.POSSIBLE}")
        self.boot = int(held.get("boot", "0")) + 1
        self.set_meta("boot", str(self.boot))
        self.commit()

    def open_groups(self, make: Callable[[int, int, int], Group]) -> Iterator[Group]:
        """Yield the groups that are not trained yet, those of a batch in its order; `make` is
        called with seq, epoch and row."""
        db = self.connection
        for seq, epoch, row, leases, *rest in db.execute(
            "SELECT seq, epoch, row, leases, state, step, place FROM groups "
            "WHERE state NOT IN ('filtered', 'trained', 'durable') ORDER BY place, seq"
        ).fetchall():
            group = make(seq, epoch, row)
            group.state, group.step, group.place = rest
            key, about = (group.group_id,), (group.group_id, "train", group.task)
            for lease_id, worker_id, members, version in json.loads(leases):
                group.leases[lease_id] = Lease(lease_id, *about, members, version)
                group.owners[lease_id] = worker_id
            sql = "SELECT header FROM trajectories WHERE group_id = ? ORDER BY member, seat"
            for (blob,) in db.execute(sql, key):
                header = decode_header(blob)
                group.finished.setdefault(header.member, []).append(header)
            sql = "SELECT member, lease_id, class FROM failures WHERE group_id = ?"
            group.failures = db.execute(sql, key).fetchall()
            for (blob,) in db.execute("SELECT header FROM turns WHERE group_id = ?", key):
                turn = decode_turn(blob)
                group.turns.setdefault(turn.member, {})[turn.seat, turn.index] = turn
            yield group

    # ------------------------------------------------------------ writing

    def _put(self, sql: str, *values: Any) -> None:
        self._queue.append((sql, values))

    def set_meta(self, key: str, value: str) -> None:
        """Remember a value under a key."""
        self._put("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, value)

    def put_group(self, group: Group) -> None:
        """Keep a group, as it will be when the writes are taken."""
        self._groups[group.seq] = group

    def add_trajectory(self, header: TrajectoryHeader, payload: bytes) -> None:
        """Keep a trajectory; the second one of an id is ignored."""
        self._trajectories.append((*columns(header), _encode(header), payload))

    def add_turn(self, group_id: str, turn: TurnHeader, payload: bytes) -> None:
        """Keep a turn of an unfinished episode; a longer version replaces a shorter one."""
        key = (group_id, turn.member, turn.seat, turn.index)
        sql = "INSERT OR REPLACE INTO turns VALUES (?, ?, ?, ?, ?, ?)"
        self._put(sql, *key, _encode(turn), payload)

    def forget_turns(
        self, group_id: str, member: int, *, seat: str | None = None, after: int = -1
    ) -> None:
        """Let go of an episode's turns (of one seat: from index `after` + 1 on)."""
        sql = "DELETE FROM turns WHERE group_id = ? AND member = ? AND seat = IFNULL(?, seat)"
        self._put(sql + " AND idx > ?", group_id, member, seat, after)

    def add_failure(self, group_id: str, member: int, lease_id: str, failure: Failure) -> None:
        """Keep a failed attempt at an episode; the second one of a lease is ignored."""
        row = (group_id, member, lease_id, failure.failure_class, failure.detail)
        self._queue += _many(schema.PUT_FAILURE, [schema.summed(*row)])

    def train(self, report: StepReport) -> None:
        """Note that the optimizer has applied a batch."""
        trained, metrics = json.dumps(report.trained), json.dumps(report.metrics)
        columns = (report.step, trained, metrics, report.ranks, report.fingerprint)
        self._queue += _many(schema.PUT_STEP, [schema.summed(*columns)])
        self._change("step = ? AND state = 'batched'", report.step, state="'trained'")

    def checkpoint(self, step: int, path: str) -> None:
        """Note that a checkpoint holds all steps before `step`."""
        self._put("INSERT OR REPLACE INTO checkpoints VALUES (?, ?)", step, path)
        self._change("state = 'trained' AND step < ?", step, state="'durable'")

    def drop_payloads(self, checkpoints: int) -> bool:
        """Drop the payloads of one step: the oldest that has payloads, if the `checkpoints` newest
        checkpoints are all newer; return whether there was such a step.

        Only one step, because other writes wait for the transaction. SQLite reuses the space. Call
        this while no other thread uses the connection.
        """
        step = number(self.connection, "dropped")  # the first with payloads
        sql = "SELECT step FROM checkpoints ORDER BY step DESC LIMIT 1 OFFSET ?"
        oldest = self.connection.execute(sql, (checkpoints - 1,)).fetchone()
        if oldest is None or step >= oldest[0]:
            return False
        self._put(schema.DROP, step)
        self.set_meta("dropped", str(step + 1))
        return True

    def roll_back(self, step: int) -> None:
        """Undo batches from `step` on; their groups are complete again and keep step and place.

        A later version is confirmed no more.
        """
        where = "step >= ? AND state IN ('batched', 'trained', 'durable')"
        self._change(where, step, state="'complete'")
        self._put("DELETE FROM steps WHERE step >= ?", step)
        self._put("DELETE FROM checkpoints WHERE step > ?", step)
        self._put("DELETE FROM evals WHERE eval_id > ?", step)
        self._put("DELETE FROM meta WHERE key = 'version' AND CAST(value AS INTEGER) > ?", step)
        # The mark is beyond the remaining steps: they have to be audited again.
        self._put(
            "DELETE FROM meta WHERE key = 'audited' AND json_extract(value, '$.step') > ?", step
        )

    def mark_audited(self, mark: str) -> None:
        """Keep an audit's mark, unless its newest checkpoint was rolled back since it was read."""
        is_held = "json_extract(?1, '$.step') <= (SELECT IFNULL(MAX(step), 0) FROM checkpoints)"
        self._put(f"INSERT OR REPLACE INTO meta SELECT 'audited', ?1 WHERE {is_held}", mark)

    def forget_plans(self) -> None:
        """Free rolled-back groups of their step (the batch size was changed)."""
        self._change("state = 'complete' AND step NOTNULL", step="NULL", place="NULL")

    def _change(self, where: str, *values: Any, **columns: str) -> None:
        """Set columns of groups to what SQL expressions say, and their checksums with them."""
        new = ", ".join(columns.get(name, name) for name in schema.COVERED["groups"].split(", "))
        changes = ", ".join(f"{name} = {value}" for name, value in columns.items())
        self._put(f"UPDATE groups SET {changes}, sum = checksum({new}) WHERE {where}", *values)

    def add_eval(self, eval_id: int, metrics: dict[str, float]) -> None:
        """Keep an evaluation's scores."""
        self._put("INSERT OR REPLACE INTO evals VALUES (?, ?)", eval_id, json.dumps(metrics))

    def take(self) -> list[Statement]:
        """Return the queued writes, for `execute`, and begin a new queue."""
        queue, self._queue = self._queue, []
        groups, self._groups = self._groups, {}
        trajectories, self._trajectories = self._trajectories, []
        rows = [_row(group) for group in groups.values()]
        cuts = range(0, len(trajectories), ROWS)
        # Their checksums are made in the thread that writes: a payload's takes 60 µs for 64 KB.
        new = [(schema.PUT_TRAJECTORIES, tuple(trajectories[at : at + ROWS])) for at in cuts]
        return [*_many(schema.PUT_GROUPS, rows), *new, *queue]

    def execute(self, statements: Iterable[Statement]) -> None:
        """Make writes durable in one transaction.

        Raises:
            InvariantError: the file cannot be written; nothing of the transaction is in it.
        """
        db = self.connection
        try:
            db.execute("BEGIN IMMEDIATE")
            for sql, values in statements:
                if sql is schema.PUT_TRAJECTORIES:
                    summed = [schema.with_payload(*row) for row in values]
                    ((sql, values),) = _many(sql, summed)
                db.execute(sql, values)
            db.execute("COMMIT")
        except sqlite3.Error as error:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise InvariantError(
                f"cannot write the ledger {self.path}: {error}. Nothing unacknowledged is lost: "
                "free the disk or repair its permissions, then start the same trial again."
            ) from error
        self._transactions += 1
        if self._transactions % LOOK_EVERY == 0:
            self._bound_log()

    def _bound_log(self) -> None:
        """Empty the log if it has grown large: SQLite by itself begins it anew only in a moment
        without readers, and readers that overlap leave none."""
        size = os.stat(f"{self.path}-wal").st_size
        if size < self._log_limit:
            return
        patience_ms = min(READERS_MS * size // LOG_BYTES, MAX_READERS_MS)
        is_held = True
        self.connection.execute(f"PRAGMA busy_timeout = {patience_ms}")
        with suppress(sqlite3.Error):  # what was committed stands
            is_held = self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        self.connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
        self._log_limit = 2 * size if is_held else LOG_BYTES
        if is_held:
            logger.warning("a reader holds the ledger's log", megabytes=size >> 20)

    def commit(self) -> None:
        """Make everything queued durable, in the calling thread."""
        self.execute(self.take())

    def close(self) -> None:
        """Close the file."""
        self.connection.close()


def columns(header: TrajectoryHeader) -> tuple[Any, ...]:
    """Return what the table of trajectories repeats of a header."""
    h = header
    reward = h.reward + 0.0  # as SQLite keeps it: a float, and never -0.0
    about = (h.trajectory_id, h.group_id, h.member, h.seat, reward, h.num_tokens)
    return (*about, h.trained_tokens, h.oldest_version, h.newest_version, h.interruptions)


def _row(group: Group) -> tuple[Any, ...]:
    leases = [(key, group.owners[key], x.members, x.version) for key, x in group.leases.items()]
    about = (group.group_id, group.seq, group.task.task_id, group.row, group.epoch)
    covered = (*about, group.state, group.reason, group.step, group.place)
    return (*covered, json.dumps(leases), schema.checksum(*covered))


def _many(sql: str, rows: Sequence[tuple[Any, ...]]) -> Iterator[Statement]:
    for first in range(0, len(rows), ROWS):
        some = rows[first : first + ROWS]
        row = f"({', '.join('?' * len(some[0]))})"
        yield sql.format(", ".join([row] * len(some))), tuple(chain.from_iterable(some))


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Open a ledger file with the pragmas that its writer and its readers share."""
    mode = "ro" if read_only else "rwc"
    has_log = path.with_name(f"{path.name}-wal").exists()  # as where it is being written
    if read_only and not has_log and not os.access(path.parent, os.W_OK):
        mode += "&immutable=1"  # else even a reader writes the log's index
    db = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True, isolation_level=None, check_same_thread=False, timeout=BUSY_MS / 1000,
        cached_statements=128,
    )  # fmt: skip
    if not read_only:  # NORMAL: safe against kill; a commit costs no fsync
        for pragma in (
            *("journal_mode=WAL", "synchronous=NORMAL", "wal_autocheckpoint=8192"),
            "secure_delete=OFF",  # some builds overwrite deleted data with zeros
        ):
            db.execute(f"PRAGMA {pragma}")
    return db


@contextmanager
def reading(path: Path) -> Generator[sqlite3.Connection]:
    """Open a ledger read-only for the body's time.

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


def read_payloads(
    path: Path, trajectory_ids: Sequence[str], *, dropped: bytes | None = None
) -> list[bytes]:
    """Return the payloads of trajectories, in this order, through a connection of its own.

    Args:
        path: The ledger's file.
        trajectory_ids: Their ids.
        dropped: Returned in place of a dropped payload; None: a dropped payload is an error.

    Raises:
        InvariantError: a trajectory, or its payload, is not in the ledger.
    """
    payloads: list[bytes] = []
    with closing(connect(path, read_only=True)) as db:
        for key in trajectory_ids:
            sql = "SELECT IFNULL(payload, ?) FROM trajectories WHERE trajectory_id = ?"
            row = db.execute(sql, (dropped, key)).fetchone()
            if row is None or row[0] is None:
                raise InvariantError(f"trajectory {key} is in a batch but not in the ledger {path}")
            payloads.append(row[0])
    return payloads


def read_turns(path: Path, lease: Lease) -> tuple[list[TurnHeader], list[bytes]]:
    """Return headers and payloads of the turns with which a lease's members go on, in its order."""
    sql = "SELECT header, payload FROM turns WHERE group_id = ? ORDER BY member, seat, idx"
    with closing(connect(path, read_only=True)) as db:
        rows = db.execute(sql, (lease.group_id,)).fetchall()
    turns = [(decode_turn(header), payload) for header, payload in rows]
    kept = [(turn, payload) for turn, payload in turns if turn.member in lease.members]
    return [turn for turn, _ in kept], [payload for _, payload in kept]


def number(db: sqlite3.Connection, key: str) -> int:
    """Return the number under a key of `meta`; 0 if there is none."""
    row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return int(row[0]) if row else 0
