"""A run whose environment, a user's own of two seats, lives in processes that come and go."""

from __future__ import annotations

from pathlib import Path

import pytest

from arealite.system.audit import audit
from tests.e2e.conftest import Site

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


def test_a_run_trains_in_an_environment_of_another_process(site: Site, tmp_path: Path) -> None:
    key = "trainer.ppo.collector.env"
    done = site.train(
        tmp_path,
        "imports=[tests.e2e.countdown]",
        "dataset.train=generated",
        "dataset.eval=generated",
        "dataset.rows=32",
        "dataset.eval_rows=4",
        f"{key}.type=countdown",
        f"{key}.countdown.pause_s=0.001",
        f"{key}.runtime.type=subprocess",
        f"{key}.runtime.processes=2",
        f"{key}.runtime.recycle_episodes=12",
        "trainer.ppo.total_steps=4",
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    logs = done.logs()
    assert done.code == 0, done.shown + logs
    trained = [line for line in done.metrics() if "reward/mean" in line]
    assert len(trained) == 4
    assert all("reward/seat/caller/mean" in line for line in trained)
    assert logs.count("environment process ready") > 2
    assert "environment process renewed" in logs
    assert "environment process died" not in logs
    assert audit(done.paths.ledger).ok
