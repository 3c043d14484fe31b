"""Autoscaling from 1 to 32 worker processes and back, as the load of the servers changes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from arealite.ext.audit.audit import audit
from arealite.ext.warm_start import modules
from tests.e2e.conftest import ROOT
from tests.e2e.many_workers import EACH, WORKERS
from tests.impl.launcher.test_local import ScriptedLauncher, after, launched, trains

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]


class Launcher(ScriptedLauncher):
    """Starts the roles of tests.e2e.many_workers."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, {"trainer": after(root / "reached") + trains(1)})
        self.root = root
        self.options = replace(self.options, max_workers=WORKERS)

    def command(self, role: str, index: int) -> list[str]:
        if role == "trainer":
            return super().command(role, index)
        name = {"datapipe": "site", "rollout": "worker"}[role]
        return [sys.executable, "-m", "tests.e2e.many_workers", name, str(self.root), str(index)]


def test_32_worker_processes_are_started_for_idle_servers_and_stopped_for_busy_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    of_run = modules.of_run
    without_torch = lambda config, has_torch: of_run(config, has_torch=False)  # noqa: E731
    monkeypatch.setattr(modules, "of_run", without_torch)  # workers check it
    code, shown, launcher = launched(Launcher(tmp_path))
    logs = "\n".join(file.read_text() for file in launcher.paths.logs.glob("*.log"))
    assert code == 0, shown + logs
    reached = json.loads((tmp_path / "reached").read_text())
    assert reached == {"full": [EACH] * WORKERS, "left": ["rollout-0@host"]}
    report = audit(launcher.paths.ledger)
    assert report.ok and not report.failures_by_class
    assert shown.count("is started: the other workers are full") == WORKERS - 1
    assert shown.count("is stopped: fewer workers are needed") == WORKERS - 1
    assert "died" not in shown
    assert [log.read_text().count("drained") for log in launcher.paths.logs.glob("rollout-*")] == [
        1
    ] * WORKERS
    assert all(child.process.returncode == 0 for child in launcher.children), shown + logs
