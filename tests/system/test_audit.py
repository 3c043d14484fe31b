"""The audit sees what is wrong, and says nothing of what is right."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from arealite.api.trainer_messages import StepReport
from arealite.base.errors import UserError
from arealite.system.audit import audit
from arealite.system.datapipe_groups import GroupBook
from arealite.system.ledger import Ledger
from tests.system.scenes import episode, experiment, failed, tasks


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A ledger with two trained steps, a filtered group, a complete one and one in flight."""
    ledger = Ledger(tmp_path / "ledger.sqlite", fingerprint={"group_size": "2"})
    ppo = experiment(tmp_path, max_attempts=1).trainer.ppo
    book = GroupBook(ledger, tasks(5), ppo=ppo, seed=1, shuffle=True)
    book.version = 0
    for number in range(7):
        group = book.next_offer()
        assert group
        lease = book.lease(group, worker_id="w", credit=2)
        for member in range(2):
            if number == 5:
                book.add(failed(lease, member), [])
            elif number != 6:
                newest = 1 if number == 1 and member == 0 else None
                book.add(episode(lease, member, newest=newest), [b"x"])
    for step in range(2):
        groups = book.compose()
        assert groups
        ids = [h.trajectory_id for g in groups for h in g.headers]
        book.mark_trained(step)
        ledger.train(StepReport(step, ids, {}))
    ledger.checkpoint(1, "/x")
    ledger.commit()
    ledger.close()
    return tmp_path / "ledger.sqlite"


def test_a_right_ledger(path: Path) -> None:
    report = audit(path)
    assert report.ok, report.table()
    assert vars(report.groups) == {
        "offered": 7, "trained": 4, "filtered": 1, "buffered": 1, "in_flight": 1,
    }  # fmt: skip
    assert report.tokens.offered == report.tokens.trained + report.tokens.buffered == 80
    assert report.filtered_by_reason == {"failed:episode_timeout": 1}
    assert report.failures_by_class == {"episode_timeout": 1}
    assert report.mixed_version_trajectories == 1
    assert report.max_staleness == 1
    assert report.weight_versions == 2
    assert "balanced" in report.table()


@pytest.mark.parametrize(
    ("harm", "line"),
    [
        ("UPDATE steps SET trained = '[]' WHERE step = 1", "step 1: the trainer's ids"),
        ("UPDATE steps SET trained = (SELECT trained FROM steps WHERE step = 0)", "trained twice"),
        ("DELETE FROM trajectories WHERE trajectory_id = 'g0/1/agent'", "missing members: g0"),
        ("DELETE FROM groups WHERE seq = 2", "1 groups of the dataset's order"),
        ("DELETE FROM steps WHERE step = 0", "steps reported or trained only: 0"),
        ("UPDATE groups SET state = 'nowhere' WHERE seq = 0", "OUT OF BALANCE"),
        ("INSERT INTO trajectories SELECT 'g0/1/x', group_id, member, seat, reward, tokens, "
         "trained_tokens, oldest, newest, interruptions, header, payload FROM trajectories "
         "WHERE trajectory_id = 'g0/1/agent'", "kept twice: g0/1/agent"),
    ],
)  # fmt: skip
def test_harm_is_seen(path: Path, harm: str, line: str) -> None:
    with sqlite3.connect(path) as db:
        db.execute(harm)
    db.close()
    report = audit(path)
    assert not report.ok
    assert line in report.table()


def test_what_is_no_ledger(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("hello, this is no database")
    with pytest.raises(UserError, match="cannot be read as a ledger"):
        audit(tmp_path / "x")
