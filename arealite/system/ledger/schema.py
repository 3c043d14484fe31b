"""The tables of a ledger and their checksums.

Each row of the COVERED tables has a checksum of its columns, and each payload has its own checksum.
The table `heads` has the number of rows and the sum of the checksums of each table. All checksums
are written in the transaction that changes the rows. An audit therefore detects rows that were
changed, deleted, moved or duplicated later.
"""

from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

SCHEMA_VERSION = "5"
SCHEMA = Path(__file__).with_suffix(".sql").read_text("utf-8")
VALID_CHECKPOINT = "step <= (SELECT IFNULL(MAX(steps.step) + 1, 0) FROM steps)"
"""SQL condition: a checkpoint contains only trained steps. Older versions stored any step."""
COVERED = {
    "groups": "group_id, seq, task_id, row, epoch, state, reason, step, place",
    "trajectories": "trajectory_id, group_id, member, seat, reward, tokens, trained_tokens, "
    "oldest, newest, interruptions, header",
    "steps": "step, trained, metrics, ranks, fingerprint",
    "failures": "group_id, member, lease_id, class, detail",
}
"""The columns of each table that the checksum of a row covers."""
CHECKSUM_MASK = (1 << 62) - 1
"""Mask of a checksum: the sum of two checksums fits an SQLite integer."""
DROP_PAYLOADS = """
UPDATE trajectories SET payload = NULL WHERE group_id IN (
  SELECT group_id FROM groups WHERE step = ?1 OR state = 'filtered'
  AND seq > (SELECT IFNULL(MAX(seq), -1) FROM groups WHERE step = ?1 - 1)
  AND seq <= (SELECT MAX(seq) FROM groups WHERE step = ?1))"""
"""SQL: drop the payloads of one step, and of groups filtered since the previous step."""

_encode = msgspec.msgpack.Encoder().encode


def checksum(*values: object, payload: bytes = b"") -> int:
    """Return 62 bits of the SHA-256 of a row's values followed by a payload.

    It detects corruption and careless edits. It does not detect forgery: without a key, anyone can
    recompute it. To add a key, hash it here before the values.
    """
    digest = sha256(_encode(values))
    digest.update(payload)
    return int.from_bytes(digest.digest()[:8], "little") & CHECKSUM_MASK


def with_checksum(*row: object) -> tuple[object, ...]:
    """Return a row of COVERED columns with its checksum."""
    return (*row, checksum(*row))


def with_payload_checksum(*row: Any) -> tuple[object, ...]:
    """Return a trajectory's columns and payload, followed by the checksums of payload and row."""
    return (*row, checksum(row[0], payload=row[-1]), checksum(*row[:-1]))


def _insert(
    table: str,
    verb: str = "INSERT OR IGNORE",
    *,
    also: str = "",
) -> str:
    """Return SQL that inserts rows; `also` lists further columns, each with a comma after it."""
    return f"{verb} INTO {table} ({COVERED[table]}, {also}sum) VALUES {{}}"


CHANGING = ("state", "reason", "step", "place", "leases", "sum")
"""Columns of a group that change after its first write."""
_CHANGES = ", ".join(f"{name} = excluded.{name}" for name in CHANGING)
PUT_GROUPS = (
    _insert("groups", "INSERT", also="leases, ") + f" ON CONFLICT (seq) DO UPDATE SET {_CHANGES}"
)
PUT_TRAJECTORIES = _insert("trajectories", also="payload, payload_sum, ")
PUT_STEP = _insert("steps")
PUT_FAILURE = _insert("failures")


def triggers(table: str) -> str:
    """Return SQL for temporary triggers that update the row of `heads` for a table."""
    add = _change_of_head(table, "+", "NEW")
    remove = _change_of_head(table, "-", "OLD")
    events = {"INSERT": add, "DELETE": remove, "UPDATE OF sum": remove + add}
    return "".join(
        f"CREATE TEMP TRIGGER {table}_{event[:6]} AFTER {event} ON main.{table} BEGIN {body} END;"
        for event, body in events.items()
    )


def _change_of_head(table: str, sign: str, row: str) -> str:
    """Return SQL that adds (+) or removes (-) a row in the count and the sum of a table."""
    return (
        f"UPDATE heads SET rows = rows {sign} 1, "
        f"sum = (sum {sign} {row}.sum) & {CHECKSUM_MASK} "
        f"WHERE name = '{table}';"
    )
