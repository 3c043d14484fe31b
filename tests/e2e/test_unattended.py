"""launchers/relaunch.sh restarts a killed launcher; no sample is lost or repeated."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import psutil
import pytest

from arealite.base.trial_files import RunPaths
from arealite.ext.audit.audit import audit
from tests.e2e import gated
from tests.e2e.conftest import ENVIRONMENT, ROOT, SLOW_S, Site, all_gone
from tests.waiting import spawned, until, until_exited

pytestmark = [pytest.mark.processes, pytest.mark.faults, pytest.mark.timeout(1800)]

STEPS, GROUPS = 6, 4


def test_killed_launcher_is_restarted_without_loss_or_repetition(
    site: Site, tmp_path: Path
) -> None:
    gate, paths = tmp_path / "gate", RunPaths(tmp_path / "e2e" / "t")
    gated.write(gate, 2 * GROUPS)  # the run cannot end before the kill
    options = [
        f"imports=[{gated.FILE}]",
        "trainer.ppo.collector.env.type=gated",
        f"trainer.ppo.collector.env.gated.gate={gate}",
        "dataset.eval=null",
        "logger.types=[]",
        f"trainer.ppo.total_steps={STEPS}",
        "trainer.ppo.checkpoint.every_steps=2",
        "trainer.ppo.checkpoint.export=false",
    ]
    command = [str(ROOT / "launchers" / "relaunch.sh"), *site.command(tmp_path, *options)]
    with spawned(command, ENVIRONMENT | {"PAUSE_S": "0"}) as script:
        trained = lambda: paths.metrics.exists() and "reward/mean" in paths.metrics.read_text()  # noqa: E731
        until(lambda: trained() or script.poll() is not None, what="a step", seconds=SLOW_S)
        (launcher,) = psutil.Process(script.pid).children()
        roles = launcher.children(recursive=True)
        assert len(roles) >= 3, "datapipe, worker and trainer"
        launcher.kill()
        until_exited(launcher, *roles)  # the roles are killed with the launcher
        gate.unlink()
        shown = script.communicate(timeout=SLOW_S)[0]
    assert script.returncode == 0, shown
    assert shown.count("relaunch.sh: exit code 137; run again") == 1
    report = audit(paths.ledger)
    assert report.ok and not report.lost and not report.repeated, report.table()
    assert report.groups.trained == STEPS * GROUPS
    lines = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines if "reward/mean" in line] == list(range(1, STEPS + 1))
    assert paths.end.read_text() == "exit code 0. \n"
    all_gone(tmp_path)


def test_refused_command_is_not_restarted(site: Site, tmp_path: Path) -> None:
    command = site.command(tmp_path, "trainer.ppo.collector.group_size=3")
    script = str(ROOT / "launchers" / "relaunch.sh")
    done = subprocess.run(
        [script, *command], env=ENVIRONMENT, capture_output=True, text=True, timeout=SLOW_S
    )
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 1 and "run again" not in done.stderr
