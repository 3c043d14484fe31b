"""Ledgers of formats 4 and 5 can be read, but not resumed; ledgers of 0.1 are refused."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest

from arealite.api.payloads import Payload
from arealite.base import config as base_config
from arealite.base.errors import UserError
from arealite.base.trial_files import RunPaths
from arealite.cli import main as cli
from arealite.cli import resume
from arealite.ext.audit.audit import audit
from arealite.ext.notebook.run import Run
from arealite.ext.offline import rows as chats
from arealite.ext.replay import command as replaying
from arealite.ext.view.report import write_report
from arealite.system.ledger.ledger import (
    Ledger,
    check_format,
    connect,
    decode_header,
    read_any_format,
    read_payloads,
)
from arealite.system.ledger.payload_checks import find_mismatch
from tests.ext.older_runs.ledgers import (
    older_run,
    payload_sum,
    rewrite_as_format_5,
    run_of_0_1,
)
from tests.ext.view.runs import branched_header, branched_session, make_run, page_data
from tests.payloads import decode_segments
from tests.system.scenes import experiment

FORMATS = (4, 5)
NUM_TRAJECTORIES = 24
OWNER = "g4/0/agent"
"""Format 5: its payload has the prompt of its group."""
FOLLOWER = "g4/1/agent"


@pytest.fixture(params=FORMATS)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> RunPaths:
    return older_run(tmp_path / "run", request.param)


def notebook_run(paths: RunPaths) -> Run:
    base_config.save(experiment(paths.root), paths.config)
    return Run(paths.root)


def change(paths: RunPaths, *statements: str) -> None:
    with closing(sqlite3.connect(paths.ledger)) as db, db:
        for statement in statements:
            assert db.execute(statement).rowcount > 0


def test_audit_reads_each_older_ledger(old: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", str(old.root)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == "balanced: nothing lost, nothing repeated"
    report = audit(old.ledger)
    assert vars(report.groups) == {
        "offered": 14, "trained": 8, "filtered": 3, "buffered": 2, "in_flight": 1,
    }  # fmt: skip
    assert report.tokens.offered == 24 * NUM_TRAJECTORIES
    assert audit(old.ledger, new_only=True).groups == report.groups


def test_audit_of_an_older_ledger_writes_nothing(old: RunPaths) -> None:
    before = old.ledger.read_bytes()
    audit(old.ledger)
    assert old.ledger.read_bytes() == before


def test_both_formats_have_the_segments_of_the_run(tmp_path: Path) -> None:
    for ledger_format in FORMATS:
        paths = older_run(tmp_path / str(ledger_format), ledger_format)
        with closing(connect(paths.ledger, read_only=True)) as db:
            stored = db.execute("SELECT trajectory_id, header FROM trajectories").fetchall()
        assert len(stored) == NUM_TRAJECTORIES
        payloads = read_payloads(paths.ledger, [trajectory_id for trajectory_id, _ in stored])
        prompts = dict[str, set[bytes]]()
        answers = set[bytes]()
        for (_, encoded), payload in zip(stored, payloads, strict=True):
            header = decode_header(encoded)
            assert find_mismatch(header, payload) == ""
            (segment,) = decode_segments(payload)
            assert segment.loss_mask == bytes(12) + b"\1" * 12
            prompts.setdefault(header.group_id, set()).add(segment.tokens[: 4 * 12])
            answers.add(segment.tokens[4 * 12 :])
            assert np.frombuffer(segment.logprobs, "<f4").tolist() == [0.0] * 12 + [-1.0] * 12
            versions = np.frombuffer(segment.versions, "<i4")
            assert versions[:12].tolist() == [-1] * 12
            assert {*versions[12:].tolist()} == {header.oldest_version, header.newest_version}
            assert np.frombuffer(segment.rewards, "<f4").tolist() == [0.0] * 23 + [header.reward]
        if ledger_format == 5:  # the run of 0.2.0 gave each trajectory a prompt of its own
            assert {len(of_group) for of_group in prompts.values()} == {1}
        assert len(answers) == NUM_TRAJECTORIES


def test_references_of_format_5_are_in_the_fixture(tmp_path: Path) -> None:
    paths = older_run(tmp_path / "run", 5)
    with closing(connect(paths.ledger, read_only=True)) as db:
        query = "SELECT substr(payload, 1, 1) FROM trajectories WHERE trajectory_id = ?"
        assert db.execute(query, (OWNER,)).fetchone() == (b"\xc1",)
        assert db.execute(query, (FOLLOWER,)).fetchone() == (b"\xc0",)


def test_ledger_rewritten_as_format_5_has_the_same_segments(tmp_path: Path) -> None:
    """The fixtures have one turn each; sessions with branches have several segments."""
    session = branched_session()
    members = [(0, branched_header(session, member), session) for member in range(2)]
    paths = make_run(tmp_path / "run", members)
    trajectory_ids = [header.trajectory_id for _, header, _ in members]
    before = audit(paths.ledger)
    rewrite_as_format_5(paths.ledger)
    for payload in read_payloads(paths.ledger, trajectory_ids):
        assert payload.turns != session.turns
        assert arrays(payload) == arrays(session)
    report = audit(paths.ledger)
    assert report.broken == before.broken == []
    assert report.turns == before.turns
    assert report.turns.startswith("8 turns certified, 0 trajectories wrong")


def arrays(payload: Payload) -> list[dict[str, object]]:
    return [
        {name: getattr(segment, name) for name in ("tokens", *ARRAYS)}
        for segment in decode_segments(payload)
    ]


ARRAYS = ("loss_mask", "logprobs", "versions", "rewards", "temperature", "routing")
PAYLOAD_OF_G0 = "UPDATE trajectories SET payload = {} WHERE group_id = 'g0'"


@pytest.mark.parametrize(
    ("harm", "line"),
    [
        ("UPDATE trajectories SET oldest = newest", "columns differ from their header"),
        ("UPDATE trajectories SET reward = 0.75 WHERE group_id = 'g1'",
         "2 trajectories differ from their checksum: g1/0/agent, g1/1/agent"),
        (PAYLOAD_OF_G0.format("(SELECT payload FROM trajectories t ORDER BY newest DESC LIMIT 1)"),
         "2 payloads differ from their header (unreadable: "),
        (PAYLOAD_OF_G0.format("substr(payload, 1, 90)"),
         "2 payloads differ from their header (unreadable: "),
        (PAYLOAD_OF_G0.format("CAST(substr(payload, 1, length(payload) - 8) "
                              "|| x'0000000000000000' AS BLOB)"),
         "2 payloads differ from their header (unreadable: "),
        (PAYLOAD_OF_G0.format("'a text'"), "2 payloads differ from their header (unreadable: "),
        (PAYLOAD_OF_G0.format("NULL"), "2 payloads missing without a drop: g0/0/agent, g0/1/agent"),
        ("UPDATE trajectories SET payload_sum = payload_sum + 1 WHERE trajectory_id = 'g0/1/agent'",
         "1 payloads differ from their header (unreadable: "),
        ("UPDATE groups SET task_id = 'train-9' WHERE group_id = 'g4'",
         "groups differ from their checksum: g4"),
        ("DELETE FROM trajectories WHERE trajectory_id = 'g0/0/agent'", "missing members: g0"),
        ("DELETE FROM groups WHERE group_id = 'g1'", "missing from the dataset's order: g1"),
        ("DELETE FROM steps WHERE step = 1", "steps with only a report or trained groups: 2"),
        ("DELETE FROM failures", "failures: 1 rows were written, 0 are in the file"),
    ],
)  # fmt: skip
def test_damage_of_an_older_ledger_is_detected(old: RunPaths, harm: str, line: str) -> None:
    change(old, harm)
    report = audit(old.ledger)
    assert not report.ok
    assert line in report.table()


def test_each_changed_byte_of_a_payload_is_detected(old: RunPaths) -> None:
    with closing(connect(old.ledger, read_only=True)) as db:
        query = "SELECT payload FROM trajectories WHERE trajectory_id = ?"
        (stored,) = db.execute(query, (FOLLOWER,)).fetchone()
    put = "UPDATE trajectories SET payload = ? WHERE trajectory_id = ?"
    for position in range(0, len(stored), 7):
        changed = stored[:position] + bytes([stored[position] ^ 1]) + stored[position + 1 :]
        with closing(sqlite3.connect(old.ledger)) as db, db:
            db.execute(put, (changed, FOLLOWER))
        (payload,) = read_payloads(old.ledger, [FOLLOWER])
        assert payload.turns == b""
        report = audit(old.ledger, new_only=True)
        assert "1 payloads differ from their header (unreadable: " in report.table()


@pytest.mark.parametrize("harm", ["substr(payload, 1, 40)", "x''", "NULL", "'text'"])
def test_damage_of_a_prompt_is_detected_in_each_payload_that_refers_to_it(
    tmp_path: Path, harm: str
) -> None:
    paths = older_run(tmp_path / "run", 5)
    change(paths, f"UPDATE trajectories SET payload = {harm} WHERE trajectory_id = '{OWNER}'")
    (payload,) = read_payloads(paths.ledger, [FOLLOWER])
    with closing(connect(paths.ledger, read_only=True)) as db:
        query = "SELECT header FROM trajectories WHERE trajectory_id = ?"
        (header,) = db.execute(query, (FOLLOWER,)).fetchone()
    assert find_mismatch(decode_header(header), payload).startswith("unreadable")
    broken = "\n".join(audit(paths.ledger).broken)
    assert OWNER in broken
    assert FOLLOWER in broken


def test_changed_payload_of_a_group_that_was_set_aside_is_detected(old: RunPaths) -> None:
    changed = "UPDATE groups SET state = 'filtered', reason = 'unusable: length' WHERE seq = 4"
    change(old, changed)
    assert "payloads" not in "\n".join(audit(old.ledger).broken)
    change(old, "UPDATE trajectories SET payload = substr(payload, 1, 90) WHERE group_id = 'g4'")
    line = f"2 payloads differ from their digest: {OWNER}, {FOLLOWER}"
    assert line in audit(old.ledger).broken


def test_payload_that_was_stored_unreadable_is_no_change(old: RunPaths) -> None:
    """A group is set aside because its payload cannot be read; nobody changed it."""
    with closing(sqlite3.connect(old.ledger)) as db, db:
        db.create_function("new_sum", 2, payload_sum)
        db.execute("UPDATE groups SET state = 'filtered', reason = 'unusable: x' WHERE seq = 4")
        db.execute(
            "UPDATE trajectories SET payload = x'9101', "
            "payload_sum = new_sum(trajectory_id, x'9101') WHERE group_id = 'g4'"
        )
    assert "payloads" not in "\n".join(audit(old.ledger).broken)
    with closing(sqlite3.connect(old.ledger)) as db, db:
        db.execute("UPDATE groups SET state = 'durable', reason = NULL WHERE seq = 4")
    broken = "\n".join(audit(old.ledger).broken)
    assert "2 payloads differ from their header (unreadable: " in broken


def test_report_of_an_older_ledger_has_its_tokens(old: RunPaths) -> None:
    made = write_report(old, old.report, most=100)
    assert made["shown"] == made["trajectories"] == NUM_TRAJECTORIES
    blocks = page_data(old.report)
    end = json.loads(blocks["end"])
    assert end["unreadable"] == 0
    change(old, "UPDATE trajectories SET payload = substr(payload, 1, 90) WHERE group_id = 'g0'")
    write_report(old, old.report, most=100)
    assert json.loads(page_data(old.report)["end"])["unreadable"] == 2


def test_dropped_payloads_of_an_older_run_are_no_damage(old: RunPaths) -> None:
    of_step_1 = "group_id IN (SELECT group_id FROM groups WHERE step = 0)"
    change(old, f"UPDATE trajectories SET payload = NULL WHERE {of_step_1}")
    change(old, "INSERT INTO meta VALUES ('dropped', '1')")
    assert audit(old.ledger).ok
    write_report(old, old.report, most=100)
    assert json.loads(page_data(old.report)["end"])["unreadable"] == 0
    assert len(notebook_run(old).trajectories()) == NUM_TRAJECTORIES - 4
    assert len(chats.load_rows(str(old.root), "train")) == NUM_TRAJECTORIES - 4


def test_notebook_reads_the_trajectories_of_an_older_run(old: RunPaths) -> None:
    rows = notebook_run(old).trajectories(step=2)
    assert [row["trajectory_id"] for row in rows] == [OWNER, FOLLOWER, "g5/0/agent", "g5/1/agent"]
    for row in rows:
        assert len(row["tokens"]) == len(row["logprobs"]) == 24
        assert row["loss_mask"] == [False] * 12 + [True] * 12
    change(old, "UPDATE trajectories SET payload = substr(payload, 1, 90) WHERE group_id = 'g4'")
    with pytest.raises(msgspec.MsgspecError):
        notebook_run(old).trajectories(step=2)


def test_older_run_is_read_as_a_dataset(old: RunPaths) -> None:
    rows = chats.load_rows(str(old.root), "train")
    assert len(rows) == NUM_TRAJECTORIES
    place, row = rows[0]
    assert place.endswith("ledger.sqlite, g0/0/agent")
    assert row["loss_mask"] == bytes(12) + b"\1" * 12
    assert len(row["tokens"]) == 4 * 24
    assert len(chats.load_rows(str(old.root), "train", min_reward=1.0)) == sum(
        placed["reward"] == 1.0 for _, placed in rows
    )


def test_steps_of_an_older_run_can_be_replayed(
    old: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replay accepts the format; tests/e2e/test_replay.py replays such a run."""
    old.config.write_text("trainer: {ppo: {}}")
    monkeypatch.setattr(replaying, "load", lambda file: None)
    (steps,) = replaying.segments(old, None)
    assert (steps.stop, steps.ranks) == (4, 1)


@pytest.mark.parametrize("ledger_format", FORMATS)
def test_resume_of_an_older_run_is_refused(tmp_path: Path, ledger_format: int) -> None:
    paths = older_run(tmp_path / "run", ledger_format)
    is_refused(resume.read_facts(paths.ledger)[0], ledger_format)
    copy = tmp_path / "copy.sqlite"
    shutil.copy(paths.ledger, copy)
    message = rf"was written by another version of AReaLite \(format {ledger_format}, now 6\)"
    with pytest.raises(UserError, match=message) as error:
        Ledger(copy, fingerprint={"group_size": "2"})
    assert "\n" not in str(error.value)


def is_refused(stored: dict[str, str], ledger_format: int) -> None:
    message = rf"was written by another version of AReaLite \(format {ledger_format}, now 6\)"
    with pytest.raises(UserError, match=message) as error:
        check_format(stored["schema"], "run", "use resume=never")
    assert "\n" not in str(error.value)


def read_view(paths: RunPaths) -> None:
    with closing(connect(paths.ledger, read_only=True)) as db:
        read_any_format(db)


READERS: dict[str, Callable[[RunPaths], object]] = {
    "audit": lambda paths: audit(paths.ledger),
    "report": lambda paths: write_report(paths, paths.report, most=100),
    "notebook": lambda paths: notebook_run(paths).trajectories(),
    "dataset": lambda paths: chats.load_rows(str(paths.root), "train"),
    "replay": lambda paths: replaying.segments(paths, None),
    "payloads": lambda paths: read_payloads(paths.ledger, ["g0/0/agent"]),
    "view": read_view,
}


@pytest.mark.parametrize("name", READERS)
def test_run_of_0_1_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    paths = run_of_0_1(tmp_path / "run")
    message = r"written by another version of AReaLite \(format 3, now 6\)"
    with pytest.raises(UserError, match=message) as error:
        READERS[name](paths)
    assert "\n" not in str(error.value)
    assert not paths.report.exists()


@pytest.mark.parametrize("command", ["audit", "report", "replay"])
def test_commands_refuse_a_run_of_0_1_in_one_line(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = run_of_0_1(tmp_path / "run")
    assert cli.main([command, str(paths.root)]) == 2
    shown = capsys.readouterr()
    assert "(format 3, now 6)" in " ".join(shown.err.split())
    assert "Traceback" not in shown.out + shown.err


def test_resume_of_a_run_of_0_1_is_refused(tmp_path: Path) -> None:
    paths = run_of_0_1(tmp_path / "run")
    is_refused(resume.read_facts(paths.ledger)[0], 3)
