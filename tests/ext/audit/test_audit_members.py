"""A missing member that has not failed for good is lost."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from arealite.base import config as base_config
from arealite.ext.audit.audit import audit
from arealite.system.data.dataset import Permutation
from arealite.system.datapipe.group_store import GroupStore
from arealite.system.ledger.ledger import Ledger
from tests.system.scenes import episode, experiment, failed, payload, tasks


def run(folder: Path, *, partial: str, attempts: int) -> Path:
    """A ledger with one complete group, whose first member failed once before it finished."""
    config = experiment(folder, max_attempts=attempts, partial_group=partial)
    ledger = Ledger(folder / "ledger.sqlite", fingerprint={"group_size": "2"})
    store = GroupStore(
        ledger, tasks(5), ppo=config.trainer.ppo, sampler=Permutation(5, seed=1, shuffle=True)
    )
    store.version = 0
    group = store.next_group()
    assert group
    first = store.lease(group, worker_id="w", credit=2)
    store.add_episode(failed(first, 0), [])
    group.retry_at.clear()
    second = store.lease(group, worker_id="w", credit=1)
    for lease, member in ((first, 1), (second, 0)):
        made = episode(lease, member)
        store.add_episode(made, [payload(made.headers[0])])
    assert group.state == "complete"
    ledger.commit()
    ledger.close()
    base_config.save(replace(config), folder / "config.yaml")
    return ledger.path


@pytest.mark.parametrize(
    ("partial", "attempts", "is_lost"),
    [("retry", 2, True), ("min_size", 2, True), ("min_size", 1, False), ("drop", 2, True)],
)
def test_missing_member_is_lost_unless_it_failed_for_good(
    tmp_path: Path, partial: str, attempts: int, is_lost: bool
) -> None:
    made = "retry" if partial == "drop" else partial
    path = run(tmp_path, partial=made, attempts=max(2, attempts))
    text = (tmp_path / "config.yaml").read_text()
    text = text.replace(f"partial_group: {made}", f"partial_group: {partial}")
    text = text.replace("max_attempts: 2", f"max_attempts: {attempts}")
    (tmp_path / "config.yaml").write_text(text)
    assert audit(path).ok, audit(path).table()
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM trajectories WHERE trajectory_id = 'g0/0/agent'")
    db.close()
    found = "missing members: g0" in audit(path).table()
    assert found == is_lost
