"""A run starts its own teacher, survives its death, and is replayed without it."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.trial import ClusterConfig
from arealite.base.trial_files import RunPaths
from arealite.ext.audit.audit import audit
from arealite.system.names.name_registry import NameRegistry
from tests.e2e import gated
from tests.e2e.conftest import ENVIRONMENT, SLOW_S, Site, all_gone
from tests.waiting import spawned, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

STEPS = 2
ROUNDING = 1e-5


def teacher_of(launcher: int) -> psutil.Process | None:
    """Return the process that the run started as its teacher."""
    for child in psutil.Process(launcher).children():
        with suppress(psutil.Error):
            if "serve-llm" in child.cmdline():
                return child
    return None


def test_run_survives_its_teacher_and_replays_without_it(site: Site, tmp_path: Path) -> None:
    """The teacher is the first policy, so its scores of step 1 equal the policy's."""
    paths = RunPaths(tmp_path / "e2e" / "t")
    gate = tmp_path / "gate"
    gated.write(gate, 0)  # no episode ends before the teacher has died
    command = site.command(
        tmp_path,
        f"imports=[{gated.FILE}]",
        "trainer.ppo.collector.env.type=gated",
        f"trainer.ppo.collector.env.gated.gate={gate}",
        "dataset.eval=null",
        f"trainer.ppo.total_steps={STEPS}",
        f"trainer.ppo.distillation.teacher={site.model}",
        "trainer.ppo.distillation.only=true",
        f"trainer.ppo.distillation.teachers.unused={site.model}",
        "trainer.ppo.distillation.top_k=4",
    )
    cluster = ClusterConfig(name_root=str(site.folder / "names"))
    trial = ExperimentConfig(experiment_name="e2e", trial_name="t-teacher", cluster=cluster)
    with spawned(command, ENVIRONMENT) as run:
        names = NameRegistry.of(trial)
        is_served = lambda: names.list("llm_server") or run.poll() is not None  # noqa: E731
        until(is_served, what="the teacher", seconds=SLOW_S)
        victim = teacher_of(run.pid)
        assert victim is not None
        victim.kill()
        victim.wait(60)
        gate.unlink()
        shown = run.communicate(timeout=SLOW_S)[0]
    assert run.returncode == 0, shown
    assert "teacher ended (killed by SIGKILL), starts again in 1 s" in shown
    all_gone(tmp_path)
    lines = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    distances = [line["distillation/reverse_kl"] for line in lines if "reward/mean" in line]
    assert len(distances) == STEPS
    assert distances[0] == pytest.approx(0.0, abs=ROUNDING)
    divergences = [line["loss/teacher_kl"] for line in lines if "reward/mean" in line]
    assert divergences[0] == pytest.approx(0.0, abs=ROUNDING)
    report = audit(paths.ledger)
    assert report.ok
    assert f"weights sent: {STEPS + 1} versions" in " ".join(report.notes)
    command = [sys.executable, "-m", "arealite.cli.main", "replay", str(paths.root)]
    again = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=SLOW_S)
    assert again.returncode == 0, again.stderr
    assert f"replayed {STEPS} steps: bitwise equal" in again.stdout
