"""The tables of a ledger and the checksum of their rows.

Each row of the COVERED tables has a checksum of its columns. The table `heads` has the number of
rows and the sum of the checksums of each table. Both are written in the transaction that changes
the rows. An audit therefore detects rows that were changed, deleted, moved or duplicated later. The
header of a trajectory has the digests of its prompt and its payload.
"""

from hashlib import sha256
from pathlib import Path

import msgspec

SCHEMA_VERSION = "6"
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
_OF_STEP = """
group_id IN (
  SELECT group_id FROM groups WHERE step = ? OR state = 'filtered'
  AND seq > (SELECT IFNULL(MAX(seq), -1) FROM groups WHERE step = ? - 1)
  AND seq <= (SELECT MAX(seq) FROM groups WHERE step = ?))"""
DROP_PAYLOADS = (
    f"UPDATE trajectories SET payload = NULL WHERE {_OF_STEP}",
    f"DELETE FROM prompts WHERE {_OF_STEP}",
)
"""SQL: drop the payloads of one step, and of groups filtered since the previous step. Each of the
three placeholders is the step."""

_encode = msgspec.msgpack.Encoder().encode


def checksum(*values: object) -> int:
    """Return 62 bits of the SHA-256 of a row's values.

    It detects corruption and careless edits. It does not detect forgery: without a key, anyone can
    recompute it. To add a key, hash it here before the values.
    """
    row_hash = sha256(_encode(values)).digest()
    return int.from_bytes(row_hash[:8], "little") & CHECKSUM_MASK


def with_checksum(*row: object) -> tuple[object, ...]:
    """Return a row of COVERED columns with its checksum."""
    return (*row, checksum(*row))


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
PUT_TRAJECTORIES = _insert("trajectories", also="prompt, payload, ")
PUT_PROMPTS = "INSERT OR IGNORE INTO prompts VALUES {}"
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
