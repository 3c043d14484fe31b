"""A run whose only worker is full starts a second worker, with real processes."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from arealite.base.trial_files import RunPaths
from arealite.ext.audit.audit import audit
from tests.e2e.conftest import ENVIRONMENT, ROOT, SLOW_S, Finished, Site, all_gone
from tests.waiting import spawned, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]


def test_full_worker_of_a_slow_environment_gets_a_second_worker(site: Site, tmp_path: Path) -> None:
    key = "trainer.ppo.collector"
    paths = RunPaths(tmp_path / "e2e" / "t")
    command = site.command(
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
        "trainer.ppo.total_steps=100000",
    )

    def is_wider() -> bool:
        """Return whether a step trained with two workers and more episodes than one runs."""
        text = paths.metrics.read_text() if paths.metrics.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
        wider = [line for line in lines if line.get("rollout/workers") == 2]
        return any(line["rollout/target_concurrency"] > 6 for line in wider)

    with spawned(command, ENVIRONMENT | {"PYTHONPATH": str(ROOT)}) as run:
        wide = lambda: is_wider() or run.poll() is not None  # noqa: E731
        until(wide, what="a second worker", seconds=SLOW_S)
        run.send_signal(signal.SIGINT)
        done = Finished(130, run.communicate(timeout=SLOW_S)[0], paths)
    all_gone(tmp_path)
    assert run.returncode == done.code, done.shown + done.logs()
    assert done.metrics()
    assert "rollout-1 is started: the other workers are full" in done.shown
    assert "died" not in done.shown
    report = audit(done.paths.ledger)
    assert report.ok and not report.failures_by_class, report.failures_by_class
