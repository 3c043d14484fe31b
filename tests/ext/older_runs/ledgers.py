"""Ledgers of earlier versions, and their payloads."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from arealite.api.payloads import Payload
from arealite.api.trajectory import Segment
from arealite.base.trial_files import RunPaths
from arealite.ext.older_runs.segments import OldReceipt, OldSegment
from arealite.system.ledger import schema
from arealite.system.ledger.ledger import columns, decode_header
from tests.payloads import decode_segments

FOLDER = Path(__file__).parent


def older_run(folder: Path, ledger_format: int) -> RunPaths:
    """Write the ledger of `small_run`, of 4 steps of 2 groups, as an earlier version wrote it."""
    paths = RunPaths(folder)
    paths.root.mkdir()
    with closing(sqlite3.connect(paths.ledger)) as db:
        db.executescript((FOLDER / f"ledger_format_{ledger_format}.sql").read_text())
    return paths


def run_of_0_1(folder: Path) -> RunPaths:
    """Write the ledger of a run of 0.1, as far as its format is read."""
    paths = RunPaths(folder)
    paths.root.mkdir()
    with closing(sqlite3.connect(paths.ledger)) as db, db:
        db.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID")
        db.execute("INSERT INTO meta VALUES ('schema', '3')")
        db.execute(
            "CREATE TABLE steps (step INTEGER PRIMARY KEY, trained TEXT, metrics TEXT, "
            "ranks INTEGER, fingerprint TEXT)"
        )
        db.execute(
            "CREATE TABLE groups (seq INTEGER PRIMARY KEY, group_id TEXT UNIQUE, task_id TEXT, "
            "row INTEGER, epoch INTEGER, state TEXT, reason TEXT, step INTEGER, place INTEGER, "
            "leases TEXT)"
        )
        db.execute("CREATE TABLE checkpoints (step INTEGER PRIMARY KEY, path TEXT)")
        db.execute(
            "CREATE TABLE trajectories (trajectory_id TEXT PRIMARY KEY, group_id TEXT, "
            "member INTEGER, seat TEXT, reward REAL, tokens INTEGER, trained_tokens INTEGER, "
            "oldest INTEGER, newest INTEGER, interruptions INTEGER, header BLOB, payload BLOB)"
        )
        db.execute("INSERT INTO steps VALUES (0, '[]', '{}', 1, 'ab')")
    return paths


def payload_sum(trajectory_id: str, payload: bytes) -> int:
    """Return the checksum that formats 4 and 5 stored beside a payload."""
    content = msgspec.msgpack.encode((trajectory_id,)) + payload
    first_bytes = hashlib.sha256(content).digest()[:8]
    return int.from_bytes(first_bytes, "little") & (1 << 62) - 1


def old_segments(segments: Sequence[Segment]) -> list[OldSegment]:
    """Return segments as formats 4 and 5 wrote them, with the receipts of their turns."""
    made = list[OldSegment]()
    for segment in segments:
        receipts = [
            OldReceipt(
                start=turn.start,
                length=turn.length,
                reused=turn.node.reused,
                reason=turn.node.reason,
                prompt=turn.node.prompt_digest,
                answer=turn.node.answer_digest,
            )
            for turn in segment.turns
        ]
        made.append(
            OldSegment(
                tokens=segment.tokens,
                loss_mask=segment.loss_mask,
                logprobs=segment.logprobs,
                versions=segment.versions,
                rewards=segment.rewards,
                temperature=segment.temperature,
                next_state=segment.turns[-1].node.next_state if segment.turns else "",
                turns=receipts,
                routing=segment.routing,
            )
        )
    return made


def shortened(segments: Sequence[OldSegment], prompt: bytes) -> list[OldSegment]:
    """Leave out the first tokens that each segment has in common with the one before (format 5).

    A token with a reward is kept, and so are the tokens after it.
    """
    made = list[OldSegment]()
    tokens_before = prompt
    for segment in segments:
        num_common = _count_common(tokens_before, segment)
        made.append(
            msgspec.structs.replace(
                segment,
                tokens=segment.tokens[4 * num_common :],
                loss_mask=segment.loss_mask[num_common:],
                logprobs=segment.logprobs[4 * num_common :],
                versions=segment.versions[4 * num_common :],
                rewards=segment.rewards[4 * num_common :],
                common=num_common,
            )
        )
        tokens_before = segment.tokens
    return made


def _count_common(tokens_before: bytes, segment: OldSegment) -> int:
    """Return the number of first tokens that need not be stored: equal, and only observed."""
    for index, is_sampled in enumerate(segment.loss_mask):
        here = slice(4 * index, 4 * index + 4)
        is_equal = tokens_before[here] == segment.tokens[here]
        if is_sampled or not is_equal or any(segment.rewards[here]):
            return index
    return len(segment.loss_mask)


def with_block(prompt: bytes, segments: Sequence[OldSegment]) -> bytes:
    """Return a payload of format 5 that stores its prompt."""
    size = len(prompt).to_bytes(4, "little")
    packed = msgspec.msgpack.encode(shortened(segments, prompt))
    return b"\xc1" + size + prompt + packed


def with_reference(owner: str, prompt: bytes, segments: Sequence[OldSegment]) -> bytes:
    """Return a payload of format 5 whose prompt the trajectory `owner` stores."""
    packed = msgspec.msgpack.encode(shortened(segments, prompt))
    return b"\xc0" + msgspec.msgpack.encode((owner, packed))


def rewrite_as_format_5(ledger: Path) -> None:
    """Change the ledger of a run into the ledger that a version before 0.3 wrote."""
    with closing(sqlite3.connect(ledger)) as db, db:
        query = "SELECT trajectory_id, prompt_tokens, turns FROM payloads"
        payloads = {
            trajectory_id: Payload(prompt=prompt, turns=turns)
            for trajectory_id, prompt, turns in db.execute(query)
        }
        db.execute("DROP VIEW payloads")
        db.execute("DROP TABLE prompts")
        db.execute("DROP TABLE versions")
        db.execute("ALTER TABLE trajectories DROP COLUMN prompt")
        db.execute("ALTER TABLE trajectories ADD COLUMN payload_sum INTEGER")
        owners = dict[tuple[str, str, bytes], str]()
        for trajectory_id, payload in payloads.items():
            _rewrite_trajectory(db, trajectory_id, payload, owners)
        total = sum(row_sum for (row_sum,) in db.execute("SELECT sum FROM trajectories"))
        head = total & schema.CHECKSUM_MASK
        db.execute("UPDATE heads SET sum = ? WHERE name = 'trajectories'", (head,))
        db.execute("UPDATE meta SET value = '5' WHERE key = 'schema'")


def _rewrite_trajectory(
    db: sqlite3.Connection,
    trajectory_id: str,
    payload: Payload,
    owners: dict[tuple[str, str, bytes], str],
) -> None:
    """Rewrite header and payload; `owners` has the trajectory that stores each prompt."""
    query = "SELECT header FROM trajectories WHERE trajectory_id = ?"
    (encoded,) = db.execute(query, (trajectory_id,)).fetchone()
    header = msgspec.structs.replace(decode_header(encoded), digest=b"")
    segments = old_segments(decode_segments(payload))
    num_observed = max(0, segments[0].loss_mask.find(1))
    prompt = segments[0].tokens[: 4 * num_observed]
    owner = owners.setdefault((header.group_id, header.seat, prompt), trajectory_id)
    if owner == trajectory_id:
        stored = with_block(prompt, segments)
    else:
        stored = with_reference(owner, prompt, segments)
    without_digest = msgspec.to_builtins(header, builtin_types=(bytes,))
    del without_digest["digest"]
    new_header = msgspec.msgpack.encode(without_digest | {"payload_sum": 1})
    put = (
        "UPDATE trajectories SET header = ?, sum = ?, payload = ?, payload_sum = ? "
        "WHERE trajectory_id = ?"
    )
    row_sum = schema.checksum(*columns(header), new_header)
    stored_sum = payload_sum(trajectory_id, stored)
    db.execute(put, (new_header, row_sum, stored, stored_sum, trajectory_id))
