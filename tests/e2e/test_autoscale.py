"""A run that outgrows its only worker gets another one, as real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from arealite.system.ledger.audit import audit
from tests.e2e.conftest import Site

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


def test_a_slow_environment_gets_more_episodes_and_a_second_worker(
    site: Site, tmp_path: Path
) -> None:
    key = "trainer.ppo.collector"
    done = site.train(
        tmp_path,
        "imports=[tests.e2e.countdown]",
        f"{key}.env.type=countdown",
        f"{key}.env.countdown.pause_s=1.0",
        f"{key}.concurrency=6",
        f"{key}.autoscale.enabled=true",
        f"{key}.autoscale.min_concurrency=2",
        f"{key}.autoscale.period_s=1.0",
        "launcher.max_workers=2",
        "dataset.eval=null",
        "trainer.ppo.max_staleness=4",
        "trainer.ppo.total_steps=8",
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.code == 0, done.shown + done.logs()
    assert "rollout-1 is started: the others are full" in done.shown
    lines = [line for line in done.metrics() if "reward/mean" in line]
    assert max(line["rollout/target_concurrency"] for line in lines) > 6
    assert [line["rollout/workers"] for line in lines][-1] == 2
    assert "died" not in done.shown
    report = audit(done.paths.ledger)
    assert report.ok and not report.failures_by_class, report.failures_by_class
