"""The audit reports each edit of a run's ledger file, and never crashes."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest

from arealite.api.payloads import Payload
from arealite.api.trajectory_tree import TrajectoryTree
from arealite.base.trial_files import RunPaths
from arealite.cli import main as cli
from arealite.ext.audit.audit import audit
from arealite.system.ledger.ledger import connect, decode_header
from tests.payloads import change_turn
from tests.system.ledger.small_run import Shape, make_run

Edit = Callable[[sqlite3.Connection], None]
ID = "g4/0/agent"
"""A trajectory of step 1, place 0."""


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps of 3 groups of 2; some groups are filtered or buffered, one is in flight."""
    return make_run(tmp_path_factory.mktemp("intact"), Shape(steps=6, tokens=90))


@pytest.fixture
def ledger(intact: Path, tmp_path: Path) -> Path:
    shutil.copytree(intact.parent, tmp_path / "run")
    return tmp_path / "run" / "ledger.sqlite"


def statements(*lines: str) -> Edit:
    def edit(db: sqlite3.Connection) -> None:
        for line in lines:
            db.execute(line)

    return edit


def payload_edit(change: Callable[[Payload], Payload]) -> Edit:
    """Change the turns of ID."""

    def edit(db: sqlite3.Connection) -> None:
        find = "SELECT prompt_tokens, turns FROM payloads WHERE trajectory_id = ?"
        prompt, turns = db.execute(find, (ID,)).fetchone()
        changed = change(Payload(prompt=prompt, turns=turns))
        assert changed.prompt == prompt
        assert changed.turns != turns
        put = "UPDATE trajectories SET payload = ? WHERE trajectory_id = ?"
        db.execute(put, (changed.turns, ID))

    return edit


def arrays(name: str, kind: str, change: Callable[[np.ndarray], None]) -> Edit:
    """Change one array of the turn of ID."""

    def changed(payload: Payload) -> Payload:
        (turn,) = TrajectoryTree.decode(payload).turns
        array = np.frombuffer(getattr(turn, name), kind).copy()
        change(array)
        return change_turn(payload, **{name: array.tobytes()})

    return payload_edit(changed)


def with_a_sampled_token_as_prompt(payload: Payload) -> Payload:
    """Make the first sampled token a token of the prompt."""
    (turn,) = TrajectoryTree.decode(payload).turns
    return change_turn(
        payload,
        added=turn.added + turn.ids[:4],
        ids=turn.ids[4:],
        logprobs=turn.logprobs[4:],
        versions=turn.versions[4:],
    )


def with_more_reward(payload: Payload) -> Payload:
    (turn,) = TrajectoryTree.decode(payload).turns
    return change_turn(payload, reward=turn.reward + 1.0)


def last_of(value: float) -> Callable[[np.ndarray], None]:
    def change(array: np.ndarray) -> None:
        array[-1] += value

    return change


def flip(array: np.ndarray) -> None:
    array[-1] ^= 1


def header(**changes: object) -> Edit:
    """Change the header of ID, and the columns that repeat it."""

    def edit(db: sqlite3.Connection) -> None:
        find = "SELECT header FROM trajectories WHERE trajectory_id = ?"
        changed = msgspec.structs.replace(
            decode_header(db.execute(find, (ID,)).fetchone()[0]), **changes
        )
        put = "UPDATE trajectories SET header = ?, reward = ?, oldest = ? WHERE trajectory_id = ?"
        blob = msgspec.msgpack.encode(changed)
        db.execute(put, (blob, changed.reward, changed.oldest_version, ID))

    return edit


def newest_everywhere(db: sqlite3.Connection) -> None:
    """Set the oldest to the newest version, in columns and headers."""
    for key, blob in db.execute("SELECT trajectory_id, header FROM trajectories").fetchall():
        old = decode_header(blob)
        new = msgspec.structs.replace(old, oldest_version=old.newest_version)
        put = "UPDATE trajectories SET header = ?, oldest = newest WHERE trajectory_id = ?"
        db.execute(put, (msgspec.msgpack.encode(new), key))


def twice_in_a_step(db: sqlite3.Connection) -> None:
    (text,) = db.execute("SELECT trained FROM steps WHERE step = 2").fetchone()
    ids = json.loads(text)
    db.execute("UPDATE steps SET trained = ? WHERE step = 2", (json.dumps([*ids[:-1], ids[0]]),))


def without_the_unique_rule(db: sqlite3.Connection) -> None:
    """Add a second row with the id of another row."""
    db.execute("PRAGMA legacy_alter_table = ON")  # keeps the view, which names the table
    db.execute("CREATE TABLE other AS SELECT * FROM trajectories")
    db.execute("INSERT INTO other SELECT (SELECT MAX(n) FROM other) + 1, trajectory_id, "
               "group_id, member, seat, reward, tokens, trained_tokens, oldest, newest, "
               "interruptions, header, sum, prompt, payload FROM other "
               f"WHERE trajectory_id = '{ID}'")  # fmt: skip
    db.execute("DROP TABLE trajectories")
    db.execute("ALTER TABLE other RENAME TO trajectories")


def without_its_index(db: sqlite3.Connection) -> None:
    """Remove the rows of one group from an index, as a lost page does."""
    db.execute("PRAGMA writable_schema = ON")
    db.execute("UPDATE sqlite_schema SET sql = sql || ' WHERE group_id != ''g4'' ' "
               "WHERE name = 'trajectories_by_group'")  # fmt: skip
    db.execute("PRAGMA schema_version = 99")
    db.commit()
    with closing(sqlite3.connect(db.execute("PRAGMA database_list").fetchone()[2])) as other:
        other.execute("REINDEX trajectories_by_group")
        other.commit()
    db.execute("UPDATE sqlite_schema SET sql = replace(sql, ' WHERE group_id != ''g4'' ', '') "
               "WHERE name = 'trajectories_by_group'")  # fmt: skip
    db.execute("PRAGMA schema_version = 100")


LAST_BUFFERED = "SELECT group_id FROM groups WHERE state = 'complete' ORDER BY seq DESC LIMIT 1"
GARBLED = "payloads differ from their header (garbled)"
EDITS: dict[str, tuple[Edit, str]] = {
    "a changed token": (arrays("ids", "<i4", flip), f"1 {GARBLED}: {ID}"),
    "a changed logprob": (arrays("logprobs", "<f4", last_of(0.5)), f"1 {GARBLED}: {ID}"),
    "a changed version": (arrays("versions", "<i4", last_of(-1)), f"1 {GARBLED}: {ID}"),
    "a changed mask": (payload_edit(with_a_sampled_token_as_prompt), f"1 {GARBLED}: {ID}"),
    "a changed reward in a payload": (payload_edit(with_more_reward), f"1 {GARBLED}: {ID}"),
    "swapped payloads": (
        statements(
            "CREATE TEMP TABLE two AS SELECT trajectory_id, payload FROM trajectories "
            "WHERE trajectory_id IN ('g4/0/agent', 'g4/1/agent')",
            "UPDATE trajectories SET payload = (SELECT payload FROM two "
            "WHERE two.trajectory_id != trajectories.trajectory_id) WHERE group_id = 'g4'",
        ),
        f"2 {GARBLED}: g4/0/agent, g4/1/agent",
    ),
    "a changed prompt": (
        statements("UPDATE prompts SET tokens = CAST(x'01000000' || substr(tokens, 5) AS BLOB) "
                   "WHERE group_id = 'g4'"),
        f"2 {GARBLED}: g4/0/agent, g4/1/agent",
    ),
    "the prompt of another group": (
        statements("UPDATE prompts SET tokens = (SELECT tokens FROM prompts "
                   "WHERE group_id = 'g5') WHERE group_id = 'g4'"),
        f"2 {GARBLED}: g4/0/agent, g4/1/agent",
    ),
    "a truncated prompt": (
        statements("UPDATE prompts SET tokens = substr(tokens, 1, 8) WHERE group_id = 'g4'"),
        f"2 {GARBLED}: g4/0/agent, g4/1/agent",
    ),
    "a prompt that is a text": (
        statements("UPDATE prompts SET tokens = 'none' WHERE group_id = 'g4'"),
        "2 payloads that are no bytes: g4/0/agent, g4/1/agent",
    ),
    "a deleted prompt": (
        statements("DELETE FROM prompts WHERE group_id = 'g4'"),
        f"2 {GARBLED}: g4/0/agent, g4/1/agent",
    ),
    "a trajectory without its prompt": (
        statements(f"UPDATE trajectories SET prompt = NULL WHERE trajectory_id = '{ID}'"),
        f"1 {GARBLED}: {ID}",
    ),
    "oldest := newest in the columns": (
        statements("UPDATE trajectories SET oldest = newest"),
        "trajectories differ from their checksum",
    ),
    "oldest := newest everywhere": (newest_everywhere, "trajectories differ from their checksum"),
    "a changed reward in header and column": (
        header(reward=0.25),
        f"differ from their checksum: {ID}",
    ),
    "oldest - 5 in header and column": (
        header(oldest_version=-4),
        f"differ from their checksum: {ID}",
    ),
    "oldest - 5": (
        statements(f"UPDATE trajectories SET oldest = oldest - 5 WHERE trajectory_id = '{ID}'"),
        f"trajectories whose columns differ from their header: {ID}",
    ),
    "tokens + 1": (
        statements(f"UPDATE trajectories SET tokens = tokens + 1 WHERE trajectory_id = '{ID}'"),
        f"trajectories whose columns differ from their header: {ID}",
    ),
    "another id in a header": (
        header(trajectory_id="g4/1/agent"),
        f"differ from their checksum: {ID}",
    ),
    "another task": (header(task_id="train-9"), f"differ from their checksum: {ID}"),
    "a header of noise": (
        statements(f"UPDATE trajectories SET header = x'00ff' WHERE trajectory_id = '{ID}'"),
        f": {ID}",
    ),
    "a column of another type": (
        statements(f"UPDATE trajectories SET tokens = 'many' WHERE trajectory_id = '{ID}'"),
        f": {ID}",
    ),
    "a truncated payload": (
        statements("UPDATE trajectories SET payload = substr(payload, 1, 60) "
                   f"WHERE trajectory_id = '{ID}'"),
        f"1 {GARBLED}: {ID}",
    ),
    "an extended payload": (
        statements("UPDATE trajectories SET payload = CAST(payload || x'00' AS BLOB) "
                   f"WHERE trajectory_id = '{ID}'"),
        f"1 {GARBLED}: {ID}",
    ),
    "a payload that is a text": (
        statements("UPDATE trajectories SET payload = payload || x'00' "
                   f"WHERE trajectory_id = '{ID}'"),
        f"1 payloads that are no bytes: {ID}",
    ),
    "a payload taken out": (
        statements(f"UPDATE trajectories SET payload = NULL WHERE trajectory_id = '{ID}'"),
        f"payloads missing without a drop: {ID}",
    ),
    "a deleted trajectory": (
        statements(f"DELETE FROM trajectories WHERE trajectory_id = '{ID}'"),
        "groups with missing members: g4",
    ),
    "the trajectory added last, deleted": (
        statements("DELETE FROM trajectories WHERE n = (SELECT MAX(n) FROM trajectories)"),
        "1 trajectories missing after: g",
    ),
    "a deleted group row": (
        statements("DELETE FROM groups WHERE group_id = 'g4'"),
        "groups missing from the dataset's order: g4",
    ),
    "a whole group deleted": (
        statements("DELETE FROM groups WHERE group_id = 'g4'",
                   "DELETE FROM trajectories WHERE group_id = 'g4'"),
        "groups missing from the dataset's order: g4",
    ),
    "the last buffered group deleted": (
        statements(f"CREATE TEMP TABLE last AS {LAST_BUFFERED}",
                   "DELETE FROM trajectories WHERE group_id IN (SELECT group_id FROM last)",
                   "DELETE FROM failures WHERE group_id IN (SELECT group_id FROM last)",
                   "DELETE FROM groups WHERE group_id IN (SELECT group_id FROM last)"),
        "groups missing from the dataset's order: g",
    ),
    "the newest group deleted": (
        statements("DELETE FROM trajectories WHERE group_id = (SELECT group_id FROM groups "
                   "ORDER BY seq DESC LIMIT 1)",
                   "DELETE FROM groups WHERE seq = (SELECT MAX(seq) FROM groups)"),
        "groups missing from the dataset's order: g",
    ),
    "a deleted step": (
        statements("DELETE FROM steps WHERE step = 1"),
        "steps with only a report or trained groups: 2",
    ),
    "the last step deleted, its groups free": (
        statements("DELETE FROM steps WHERE step = 5",
                   "UPDATE groups SET state = 'complete', step = NULL, place = NULL "
                   "WHERE step = 5"),
        "3 groups differ from their checksum: g",
    ),
    "a duplicated trajectory": (
        statements("INSERT INTO trajectories SELECT NULL, 'g4/0/x', group_id, member, seat, "
                   "reward, tokens, trained_tokens, oldest, newest, interruptions, header, sum, "
                   f"prompt, payload FROM trajectories WHERE trajectory_id = '{ID}'"),
        "trajectories stored twice: g4/0/agent",
    ),
    "a duplicated group": (
        statements("INSERT INTO groups SELECT (SELECT MAX(seq) + 1 FROM groups), 'g99', task_id, "
                   "row, epoch, state, reason, step, place, leases, sum FROM groups WHERE seq = 4"),
        "groups differ from their checksum: g99",
    ),
    "an id twice in a step": (twice_in_a_step, "steps whose reported ids differ from the batch: 3"),
    "an id twice in the table": (without_the_unique_rule, f"trajectories stored twice: {ID}"),
    "a moved group": (
        statements("UPDATE groups SET step = 3 WHERE group_id = 'g4'"),
        "groups differ from their checksum: g4",
    ),
    "two groups that change their places": (
        statements("UPDATE groups SET place = 1 - place WHERE step = 1 AND place < 2"),
        "2 groups differ from their checksum: g",
    ),
    "a buffered group filtered": (
        statements("UPDATE groups SET state = 'filtered', reason = 'stale' "
                   "WHERE group_id = (SELECT group_id FROM groups WHERE state = 'complete')"),
        "groups differ from their checksum: g",
    ),
    "a trained group filtered": (
        statements("UPDATE groups SET state = 'filtered', reason = 'x' WHERE group_id = 'g4'"),
        "groups differ from their checksum: g4",
    ),
    "another row of the data": (
        statements("UPDATE groups SET row = row + 1 WHERE group_id = 'g4'"),
        "groups differ from their checksum: g4",
    ),
    "another task of a group": (
        statements("UPDATE groups SET task_id = 'train-99' WHERE group_id = 'g4'"),
        "groups differ from their checksum: g4",
    ),
    "another fingerprint": (
        statements("UPDATE steps SET fingerprint = 'ff' WHERE step = 2"),
        "steps differ from their checksum: 3",
    ),
    "other metrics of a step": (
        statements("UPDATE steps SET metrics = '{}' WHERE step = 2"),
        "steps differ from their checksum: 3",
    ),
    "a step that is no JSON": (
        statements("UPDATE steps SET trained = '[' WHERE step = 2"),
        "steps differ from their checksum: 3",
    ),
    "a deleted failure": (
        statements("DELETE FROM failures"), "failures: 1 rows were written, 0 are in the file",
    ),
    "a row put back as it was": (
        statements("UPDATE groups SET state = 'trained', sum = (SELECT sum FROM groups "
                   "WHERE seq = 5) WHERE seq = 4"),
        "groups differ from their checksum: g4",
    ),
    "an index that lost a group": (without_its_index, "the file is damaged: row "),
    "a head made smaller": (
        statements("UPDATE heads SET rows = rows - 1 WHERE name = 'steps'"),
        "steps: 5 rows were written, 6 are in the file",
    ),
}  # fmt: skip


def shown(ledger: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = cli.main(["audit", str(ledger.parent)])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out + captured.err


def test_untouched_run_passes_the_audit(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = shown(ledger, capsys)
    assert (code, text.splitlines()[-1]) == (0, "balanced: nothing lost, nothing repeated")


@pytest.mark.parametrize("name", EDITS)
def test_edit_is_reported(name: str, ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit, line = EDITS[name]
    with closing(sqlite3.connect(ledger)) as db, db:
        edit(db)
    code, text = shown(ledger, capsys)
    assert code == 1
    assert line in text
    assert text.splitlines()[-1] == "OUT OF BALANCE"


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.97, 0.999])
def test_truncated_file_is_reported(
    share: float, ledger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ledger.read_bytes()
    ledger.write_bytes(data[: int(share * len(data))])
    code, text = shown(ledger, capsys)
    assert code in (1, 2)
    assert "cannot be read as a ledger" in text or "OUT OF BALANCE" in text
    if share >= 0.6:
        is_index = "Unreadable: an index." in text
        assert is_index or "after g" in text or ": g" in text, "it names from where on"


def pages(ledger: Path) -> Iterator[tuple[int, str]]:
    with closing(sqlite3.connect(ledger)) as db:
        yield from db.execute("SELECT pageno, name FROM dbstat WHERE pageno > 1")


def test_each_zeroed_page_is_reported(intact: Path, tmp_path: Path) -> None:
    """Each zeroed page with a record is reported in one line."""
    for folder in (tmp_path / "run",):
        shutil.copytree(intact.parent, folder)
    ledger = tmp_path / "run" / "ledger.sqlite"
    whole, size = ledger.read_bytes(), 4096
    for page, name in [*pages(ledger)]:
        begin = (page - 1) * size
        if not any(whole[begin : begin + size]):
            continue  # it was so
        ledger.write_bytes(whole[:begin] + bytes(size) + whole[begin + size :])
        assert cli.main(["audit", str(ledger.parent)]) in (1, 2), f"page {page} of {name}"


def test_ledger_older_than_a_checkpoint_is_reported(
    ledger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After its log is deleted, a ledger is consistent, but its newest part is missing."""
    (RunPaths(ledger.parent).checkpoints / "step-000009").mkdir(parents=True)
    code, text = shown(ledger, capsys)
    assert code == 1
    assert "a checkpoint has 9 steps, the ledger 6 (was ledger.sqlite-wal deleted?)" in text


def test_deleted_log_is_reported_if_pages_are_inconsistent(
    intact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = make_run(tmp_path / "live", Shape(steps=6), leave_log=True)
    assert ledger.with_name("ledger.sqlite-wal").stat().st_size > 0
    (RunPaths(ledger.parent).checkpoints / "step-000004").mkdir(parents=True)
    assert shown(ledger, capsys)[0] == 0
    ledger.with_name("ledger.sqlite-wal").unlink()
    ledger.with_name("ledger.sqlite-shm").unlink(missing_ok=True)
    code, text = shown(ledger, capsys)
    assert code in (1, 2), text


def test_audit_writes_nothing(ledger: Path) -> None:
    with closing(connect(ledger, read_only=True)) as db:
        before = [*db.iterdump()]
    audit(ledger)
    audit(ledger, new_only=True)
    with closing(connect(ledger, read_only=True)) as db:
        assert [*db.iterdump()] == before
