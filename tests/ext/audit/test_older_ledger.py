"""A ledger of version 0.1.0, without checksums, can be read but not resumed."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from arealite.base.errors import UserError
from arealite.base.trial_files import RunPaths
from arealite.cli import main as cli
from arealite.ext.audit.audit import audit
from arealite.ext.view.report import write_report
from arealite.system.ledger.ledger import Ledger

NOTE = "no checksums: an older AReaLite wrote this ledger"


@pytest.fixture
def old(tmp_path: Path) -> RunPaths:
    """`small_run` of 4 steps of 2 groups, written by 0.1.0 and dumped by sqlite3."""
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    with closing(sqlite3.connect(paths.ledger)) as db:
        db.executescript(Path(__file__).with_name("ledger_0_1_0.sql").read_text())
    return paths


def test_audit_of_an_older_ledger_notes_the_missing_checksums(
    old: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["audit", str(old.root)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == "balanced: nothing lost, nothing repeated"
    assert shown[-2].startswith(NOTE)
    assert audit(old.ledger, new_only=True).groups == audit(old.ledger).groups


@pytest.mark.parametrize(
    ("harm", "line"),
    [
        ("UPDATE trajectories SET oldest = newest", "columns differ from their header"),
        ("UPDATE trajectories SET payload = (SELECT payload FROM trajectories t ORDER BY "
         "newest DESC LIMIT 1) WHERE group_id = 'g0'",
         "payloads differ from their header (versions)"),
        ("UPDATE trajectories SET payload = substr(payload, 1, 90) WHERE group_id = 'g0'",
         "payloads differ from their header"),
        ("DELETE FROM trajectories WHERE trajectory_id = 'g0/0/agent'", "missing members: g0"),
        ("DELETE FROM groups WHERE group_id = 'g1'", "missing from the dataset's order: g1"),
        ("DELETE FROM steps WHERE step = 1", "steps with only a report or trained groups: 2"),
    ],
)  # fmt: skip
def test_damage_of_an_older_ledger_is_detected_without_checksums(
    old: RunPaths, harm: str, line: str
) -> None:
    with closing(sqlite3.connect(old.ledger)) as db, db:
        db.execute(harm)
    report = audit(old.ledger)
    assert not report.ok
    assert line in report.table()


def test_report_of_an_older_ledger_is_written(old: RunPaths) -> None:
    made = write_report(old, old.report, most=100)
    assert made["shown"] == made["trajectories"] > 0


def test_resume_in_an_older_ledger_is_refused(old: RunPaths, tmp_path: Path) -> None:
    copy = tmp_path / "copy.sqlite"
    shutil.copy(old.ledger, copy)
    with pytest.raises(UserError, match="was started with schema=3, now it is 5") as error:
        Ledger(copy, fingerprint={"group_size": "2"})
    assert "\n" not in str(error.value)
