"""The audit reports damage, and no problem of an intact ledger."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from arealite.api.trainer_messages import StepReport
from arealite.base.errors import UserError
from arealite.base.trial_files import RunPaths
from arealite.ext.audit.audit import audit
from arealite.system.data.dataset import Permutation
from arealite.system.datapipe.group_store import GroupStore
from arealite.system.ledger.ledger import Ledger, decode_header, open_read_only
from tests.system.scenes import episode, experiment, failed, payload, tasks


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A ledger with two trained steps, and one filtered, one complete and one leased group."""
    ledger = Ledger(tmp_path / "ledger.sqlite", fingerprint={"group_size": "2"})
    ppo = experiment(tmp_path, max_attempts=1).trainer.ppo
    store = GroupStore(ledger, tasks(5), ppo=ppo, sampler=Permutation(5, seed=1, shuffle=True))
    store.version = 0
    for number in range(7):
        group = store.next_group()
        assert group
        lease = store.lease(group, worker_id="w", credit=2)
        for member in range(2):
            if number == 5:
                store.add_episode(failed(lease, member), [])
            elif number != 6:
                newest = 1 if number == 1 and member == 0 else None
                made = episode(lease, member, newest=newest)
                store.add_episode(made, [payload(made.headers[0])])
    for step in range(2):
        groups = store.compose()
        assert groups
        ids = [h.trajectory_id for g in groups for h in g.headers]
        store.mark_trained(step)
        ledger.train(StepReport(step=step, trained=ids, metrics={}))
    ledger.checkpoint(1, "/x")
    ledger.commit()
    ledger.close()
    return tmp_path / "ledger.sqlite"


def test_intact_ledger_passes_the_audit(path: Path) -> None:
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
        ("UPDATE steps SET trained = '[]' WHERE step = 1",
         "1 steps whose reported ids differ from the batch: 2"),
        ("UPDATE steps SET trained = (SELECT trained FROM steps WHERE step = 0)",
         "1 steps whose reported ids differ from the batch: 2"),
        ("DELETE FROM trajectories WHERE trajectory_id = 'g0/1/agent'", "missing members: g0"),
        ("DELETE FROM groups WHERE seq = 2", "1 groups missing from the dataset's order: g2"),
        ("DELETE FROM steps WHERE step = 0", "steps with only a report or trained groups: 1"),
        ("UPDATE groups SET state = 'nowhere' WHERE seq = 0", "OUT OF BALANCE"),
        ("UPDATE groups SET state = 'batched' WHERE step = 0",
         "1 unreported steps before a reported step: 1"),
        ("UPDATE trajectories SET payload = substr(payload, 1, 50) WHERE group_id = 'g1'",
         "2 payloads differ from their header (garbled): g1/0/agent, g1/1/agent"),
        ("UPDATE trajectories SET payload = CAST(payload || payload AS BLOB) "
         "WHERE trajectory_id = 'g1/0/agent'",
         "1 payloads differ from their header (garbled): g1/0/agent"),
        ("UPDATE trajectories SET payload = payload || payload WHERE trajectory_id = 'g1/0/agent'",
         "1 payloads that are no bytes: g1/0/agent"),
        ("UPDATE trajectories SET tokens = 9 WHERE trajectory_id = 'g2/1/agent'",
         "1 trajectories whose columns differ from their header: g2/1/agent"),
        ("INSERT INTO turns VALUES ('g0', 1, 'agent', 0, x'', x'')",
         "1 ended episodes with stored turns: g0/1"),
        ("INSERT INTO turns VALUES ('g5', 0, 'agent', 0, x'', x'')",
         "ended episodes with stored turns: g5/0"),
        ("INSERT INTO trajectories SELECT NULL, 'g0/1/x', group_id, member, seat, reward, tokens, "
         "trained_tokens, oldest, newest, interruptions, header, sum, prompt, payload FROM "
         "trajectories WHERE trajectory_id = 'g0/1/agent'",
         "trajectories stored twice: g0/1/agent"),
    ],
)  # fmt: skip
def test_damage_is_detected(path: Path, harm: str, line: str) -> None:
    with sqlite3.connect(path) as db:
        db.execute(harm)
    db.close()
    report = audit(path)
    assert not report.ok
    assert line in report.table()


def test_trajectories_without_a_score_are_stored_and_pass_the_audit(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", fingerprint={})
    ppo = experiment(tmp_path, num_groups=1, max_attempts=1).trainer.ppo
    store = GroupStore(ledger, tasks(5), ppo=ppo, sampler=Permutation(5, seed=1, shuffle=True))
    store.version = 0
    for rewards in ((1.0, None), (None, None)):
        group = store.next_group()
        assert group
        lease = store.lease(group, worker_id="w", credit=2)
        for member, reward in enumerate(rewards):
            made = episode(lease, member, reward=reward)
            store.add_episode(made, [payload(made.headers[0])])
    for step in range(2):
        groups = store.compose()
        assert groups
        store.mark_trained(step)
        ids = [header.trajectory_id for group in groups for header in group.headers]
        ledger.train(StepReport(step=step, trained=ids, metrics={}))
    ledger.commit()
    ledger.close()
    report = audit(tmp_path / "ledger.sqlite")
    assert report.ok, report.table()
    assert report.groups.trained == report.groups.offered == 2
    with open_read_only(tmp_path / "ledger.sqlite") as db:
        rows = db.execute("SELECT reward, header FROM trajectories ORDER BY n").fetchall()
    assert [reward for reward, _ in rows] == [1.0, None, None, None]
    assert [decode_header(header).reward for _, header in rows] == [1.0, None, None, None]


def test_turns_of_a_running_episode_are_no_problem(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("INSERT INTO turns VALUES ('g6', 0, 'agent', 0, x'', x'')")
    db.close()
    assert audit(path).ok


@pytest.mark.parametrize(
    ("bounds", "policy", "ok"),
    [((1,), "wait", True), ((0,), "wait", False), ((0, 1), "drop", True), ((0,), "mask", True)],
)
def test_token_age_is_checked_against_the_largest_configured_staleness(
    path: Path, bounds: tuple[int, ...], policy: str, ok: bool
) -> None:
    paths = RunPaths(path.parent)
    paths.configs.mkdir()
    for number, bound in enumerate(bounds):
        file = paths.configs / f"{number:06d}.yaml" if number else paths.config
        ppo = f"{{max_staleness: {bound}, staleness_policy: {policy}}}"
        file.write_text(f"trainer: {{ppo: {ppo}}}")
    report = audit(path)
    assert report.ok == ok
    if not ok:
        assert (
            "4 trained trajectories with tokens older than max_staleness=0: g2/0" in report.table()
        )


def test_file_that_is_not_a_ledger_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("hello, this is no database")
    with pytest.raises(UserError, match="cannot be read as a ledger"):
        audit(tmp_path / "x")
