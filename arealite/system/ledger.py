"""Keeps the truth of a trial in one SQLite file: every group's state, every trajectory, every step.

A file with transactions rather than a service, because kill -9 at any instant must leave it right,
and viewers, audits and replay read it with nothing of ours running.

    group: offered → leased → complete → filtered(reason) | batched(step) → trained → durable

Groups are offered in order: `seq` counts them, so the dataset's cursor is the number of rows in
`groups`. A batched group keeps its `step` and `place` when it is rolled back to complete: that step
is then filled by the same groups in the same order. Writes are queued in memory, in order, and
become durable by `execute`, one transaction for all; so the file always holds a prefix of them.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from arealite.api.rollout_messages import Failure, Lease, TurnHeader
from arealite.api.trainer_messages import StepReport
from arealite.api.trajectory import TrajectoryHeader
from arealite.base import log
from arealite.base.errors import InvariantError, UserError

logger = log.get(__name__)

LOG_BYTES = 128 << 20
"""A write-ahead log of this size is emptied even if readers have to be waited for."""
READERS_MS, MAX_READERS_MS = 200, 2000
"""How long a commit waits for them then: at first; longer the larger they have made the log."""
BUSY_MS = 10_000
"""How long a connection waits for a lock."""
SCHEMA_VERSION = "2"
SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
-- one row a group ever offered for training; seq is its place in the order of the dataset
CREATE TABLE groups (
  seq INTEGER PRIMARY KEY, group_id TEXT UNIQUE, task_id TEXT, row INTEGER, epoch INTEGER,
  state TEXT, reason TEXT, step INTEGER, place INTEGER);
CREATE INDEX groups_by_state ON groups (state);
CREATE INDEX groups_by_step ON groups (step);
-- one row a lease; ended = 1 when its members are all in, or it was lost
CREATE TABLE leases (
  lease_id TEXT PRIMARY KEY, group_id TEXT, worker_id TEXT, members TEXT, version INTEGER,
  ended INTEGER) WITHOUT ROWID;
CREATE INDEX leases_by_group ON leases (group_id);
-- header and payload as they came (msgpack); the other columns repeat the header for queries
CREATE TABLE trajectories (
  trajectory_id TEXT UNIQUE, group_id TEXT, member INTEGER, seat TEXT, reward REAL,
  tokens INTEGER, trained_tokens INTEGER, oldest INTEGER, newest INTEGER, interruptions INTEGER,
  header BLOB, payload BLOB);
CREATE INDEX trajectories_by_group ON trajectories (group_id);
CREATE TABLE failures (
  group_id TEXT, member INTEGER, lease_id TEXT, class TEXT, detail TEXT,
  PRIMARY KEY (group_id, member, lease_id)) WITHOUT ROWID;
-- turns of episodes under way: header and payload as they came; gone with the episode's end
CREATE TABLE turns (
  group_id TEXT, member INTEGER, seat TEXT, idx INTEGER, header BLOB, payload BLOB,
  PRIMARY KEY (group_id, member, seat, idx)) WITHOUT ROWID;
-- one row a step the trainer reported; trained = JSON list of the trajectory ids it says it used
CREATE TABLE steps (
  step INTEGER PRIMARY KEY, trained TEXT, metrics TEXT, ranks INTEGER, fingerprint TEXT);
CREATE TABLE checkpoints (step INTEGER PRIMARY KEY, path TEXT);
CREATE TABLE evals (eval_id INTEGER PRIMARY KEY, metrics TEXT);
"""

COLUMNS = 12
"""Of the table of trajectories."""
TRAJECTORY_ROW = f"({', '.join('?' * COLUMNS)})"
AT_ONCE = 32 * COLUMNS
"""Values of trajectories in one statement."""
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
        self._trajectories: list[Any] = []
        """Values of the rows to be inserted, one row after the other."""
        self._log_limit = LOG_BYTES
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.connection = connect(path)
            self._prepare(fingerprint)
        except (OSError, sqlite3.Error) as error:
            raise UserError(
                f"Cannot use the ledger {path}: {error}. Is the folder writable, the disk full?"
            ) from error

    def _prepare(self, fingerprint: dict[str, str]) -> None:
        expected = {"schema": SCHEMA_VERSION, **fingerprint}
        db = self.connection
        if not db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
            db.executescript("BEGIN IMMEDIATE;" + SCHEMA)
            db.executemany("INSERT INTO meta VALUES (?, ?)", expected.items())
            db.execute("COMMIT")
        held = dict(db.execute("SELECT key, value FROM meta").fetchall())
        for key, value in expected.items():
            if held.get(key) != value:
                raise UserError(
                    f"The ledger {self.path} was begun with {key}={held.get(key)}, now it is "
                    f"{value}. Restore it, or choose another trial_name."
                )
        self.boot = int(held.get("boot", "0")) + 1
        self.set_meta("boot", str(self.boot))
        self.commit()

    # ------------------------------------------------------------ writing

    def _put(self, sql: str, *values: Any) -> None:
        self._queue.append((sql, values))

    def set_meta(self, key: str, value: str) -> None:
        """Remember a value under a key."""
        self._put("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, value)

    def forget_meta(self, key: str) -> None:
        """Let go of what is under a key."""
        self._put("DELETE FROM meta WHERE key = ?", key)

    def offer(self, seq: int, group_id: str, *, task_id: str, row: int, epoch: int) -> None:
        """Add the next group of the dataset's order."""
        columns = "seq, group_id, task_id, row, epoch, state"
        sql = f"INSERT INTO groups ({columns}) VALUES (?, ?, ?, ?, ?, 'offered')"
        self._put(sql, seq, group_id, task_id, row, epoch)

    def lease(self, lease: Lease, *, worker_id: str) -> None:
        """Note who runs which members of a group."""
        members, version = json.dumps(lease.members), lease.version
        sql = "INSERT INTO leases VALUES (?, ?, ?, ?, ?, 0)"
        self._put(sql, lease.lease_id, lease.group_id, worker_id, members, version)
        self._put("UPDATE groups SET state = 'leased' WHERE group_id = ?", lease.group_id)

    def end_lease(self, lease_id: str) -> None:
        """Note that nothing more is expected of a lease."""
        self._put("UPDATE leases SET ended = 1 WHERE lease_id = ?", lease_id)

    def add_trajectory(self, header: TrajectoryHeader, payload: bytes) -> None:
        """Keep a trajectory; the second one of an id is ignored."""
        h = header
        self._trajectories += (
            *(h.trajectory_id, h.group_id, h.member, h.seat, h.reward, h.num_tokens),
            *(h.trained_tokens, h.oldest_version, h.newest_version, h.interruptions),
            *(_encode(h), payload),
        )

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
        sql = "INSERT OR IGNORE INTO failures VALUES (?, ?, ?, ?, ?)"
        self._put(sql, group_id, member, lease_id, failure.failure_class, failure.detail)

    def set_state(self, group_id: str, state: str, reason: str | None = None) -> None:
        """Move a group to complete, or to filtered with a reason."""
        sql = "UPDATE groups SET state = ?, reason = ? WHERE group_id = ?"
        self._put(sql, state, reason, group_id)

    def batch(self, step: int, group_ids: Sequence[str]) -> None:
        """Fix the groups of batch `step`, in this order."""
        sql = "UPDATE groups SET state = 'batched', step = ?, place = ? WHERE group_id = ?"
        for place, group_id in enumerate(group_ids):
            self._put(sql, step, place, group_id)

    def train(self, report: StepReport) -> None:
        """Note that the optimizer has applied a batch."""
        trained, metrics = json.dumps(report.trained), json.dumps(report.metrics)
        columns = (report.step, trained, metrics, report.ranks, report.fingerprint)
        self._put("INSERT OR IGNORE INTO steps VALUES (?, ?, ?, ?, ?)", *columns)
        sql = "UPDATE groups SET state = 'trained' WHERE step = ? AND state = 'batched'"
        self._put(sql, report.step)

    def checkpoint(self, step: int, path: str) -> None:
        """Note that a checkpoint holds all steps before `step`."""
        self._put("INSERT OR REPLACE INTO checkpoints VALUES (?, ?)", step, path)
        self._put("UPDATE groups SET state = 'durable' WHERE state = 'trained' AND step < ?", step)

    def roll_back(self, step: int) -> None:
        """Undo batches from `step` on; their groups are complete again and keep step and place."""
        self._put(
            "UPDATE groups SET state = 'complete' "
            "WHERE step >= ? AND state IN ('batched', 'trained', 'durable')",
            step,
        )
        self._put("DELETE FROM steps WHERE step >= ?", step)
        self._put("DELETE FROM checkpoints WHERE step > ?", step)
        self._put("DELETE FROM evals WHERE eval_id > ?", step)

    def forget_plans(self) -> None:
        """Free rolled-back groups of their step (the batch size was changed)."""
        self._put("UPDATE groups SET step = NULL, place = NULL WHERE state = 'complete'")

    def add_eval(self, eval_id: int, metrics: dict[str, float]) -> None:
        """Keep an evaluation's scores."""
        self._put("INSERT OR REPLACE INTO evals VALUES (?, ?)", eval_id, json.dumps(metrics))

    def take(self) -> list[Statement]:
        """Return the queued writes, for `execute`, and begin a new queue.

        Many trajectories are one statement: sqlite3 gives the interpreter's lock away at each.
        """
        queue, self._queue = self._queue, []
        values, self._trajectories = self._trajectories, []
        for first in range(0, len(values), AT_ONCE):
            some = values[first : first + AT_ONCE]
            rows = ", ".join([TRAJECTORY_ROW] * (len(some) // COLUMNS))
            queue.append((f"INSERT OR IGNORE INTO trajectories VALUES {rows}", tuple(some)))
        return queue

    def execute(self, statements: Iterable[Statement]) -> None:
        """Make writes durable in one transaction.

        Raises:
            InvariantError: the file cannot be written; nothing of the transaction is in it.
        """
        db = self.connection
        try:
            db.execute("BEGIN IMMEDIATE")
            for sql, values in statements:
                db.execute(sql, values)
            db.execute("COMMIT")
            self._bound_log()
        except sqlite3.Error as error:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise InvariantError(
                f"cannot write the ledger {self.path}: {error}. Nothing unacknowledged is lost: "
                "free the disk or repair its permissions, then start the same trial again."
            ) from error

    def _bound_log(self) -> None:
        """Empty the log if it has grown large: SQLite by itself begins it anew only in a moment
        without readers, and readers that overlap leave none."""
        size = self.path.with_name(self.path.name + "-wal").stat().st_size
        if size < self._log_limit:
            return
        patience_ms = min(READERS_MS * size // LOG_BYTES, MAX_READERS_MS)
        self.connection.execute(f"PRAGMA busy_timeout = {patience_ms}")
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


class LedgerWriter:
    """Commits from the event loop: one transaction for all of a few milliseconds, in a thread.

    While `run` runs, nobody else may write, except in a callback.
    """

    def __init__(self, ledger: Ledger, *, interval_s: float) -> None:
        self.ledger = ledger
        self.interval_s = interval_s
        self._callbacks: list[Callable[[], None]] = []
        self._wanted = asyncio.Event()
        self._is_closing = False
        self._busy_s = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")

    def after_commit(self, callback: Callable[[], None]) -> None:
        """Call `callback` in the loop once everything queued so far is durable."""
        self._callbacks.append(callback)
        self._wanted.set()

    async def run(self) -> None:
        """Commit whenever asked, until `close`.

        Raises:
            InvariantError: the file cannot be written any more.
        """
        loop = asyncio.get_running_loop()
        try:
            while not (self._is_closing and not self._callbacks):
                await self._wanted.wait()
                if not self._is_closing:
                    await asyncio.sleep(self.interval_s)  # gather company for the transaction
                self._wanted.clear()
                callbacks, self._callbacks = self._callbacks, []
                statements = self.ledger.take()
                seconds = await loop.run_in_executor(self._thread, self._execute, statements)
                self._busy_s += seconds
                for callback in callbacks:
                    callback()
        finally:
            self._thread.shutdown(wait=True)

    def _execute(self, statements: list[Statement]) -> float:
        begin = time.perf_counter()
        self.ledger.execute(statements)
        return time.perf_counter() - begin

    def take_busy_s(self) -> float:
        """Return the seconds that the thread was in transactions since the last call."""
        taken, self._busy_s = self._busy_s, 0.0
        return taken

    def close(self) -> None:
        """Let `run` write what is queued and return."""
        self._is_closing = True
        self._wanted.set()


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Open a ledger file with the pragmas that its writer and its readers share."""
    mode = "ro" if read_only else "rwc"
    db = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True, isolation_level=None, check_same_thread=False, timeout=BUSY_MS / 1000,
        cached_statements=64,
    )  # fmt: skip
    if not read_only:  # NORMAL: safe against kill; a commit costs no fsync
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "wal_autocheckpoint=8192"):
            db.execute(f"PRAGMA {pragma}")
    return db


def read_payloads(path: Path, trajectory_ids: Sequence[str]) -> list[bytes]:
    """Return the payloads of trajectories, in this order, through a connection of its own.

    Raises:
        InvariantError: one is not in the ledger.
    """
    payloads: list[bytes] = []
    with closing(connect(path, read_only=True)) as db:
        for key in trajectory_ids:
            sql = "SELECT payload FROM trajectories WHERE trajectory_id = ?"
            row = db.execute(sql, (key,)).fetchone()
            if row is None:
                raise InvariantError(f"trajectory {key} is in a batch but not in the ledger {path}")
            payloads.append(row[0])
    return payloads


def read_turns(path: Path, lease: Lease) -> tuple[list[TurnHeader], list[bytes]]:
    """Return headers and payloads of the turns with which a lease's members go on, in its order."""
    sql = "SELECT header, payload FROM turns WHERE group_id = ? ORDER BY member, seat, idx"
    with closing(connect(path, read_only=True)) as db:
        rows = [
            (decode_turn(header), payload) for header, payload in db.execute(sql, (lease.group_id,))
        ]
    rows = [row for row in rows if row[0].member in lease.members]
    return [header for header, _ in rows], [payload for _, payload in rows]
