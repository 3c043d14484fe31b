"""The trainer of a run with critic and reference is killed: both models are restored."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from arealite.base.trial_files import RunPaths
from arealite.ext.audit.audit import audit
from arealite.impl.engine import checkpoint
from tests.e2e import gated
from tests.e2e.conftest import ENVIRONMENT, SLOW_S, Site
from tests.e2e.test_replay import REWARD
from tests.waiting import spawned, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

STEPS = 3
OPTIONS = (
    f"imports=[variety,{gated.FILE}]",
    "trainer.ppo.collector.env.type=gated",
    "trainer.ppo.collector.env.gated.reward.type=variety",
    "dataset.eval=null",
    "logger.types=[]",
    f"trainer.ppo.total_steps={STEPS}",
    "trainer.ppo.epochs=2",
    "trainer.ppo.advantage.type=gae",
    "trainer.ppo.critic.lr=1e-3",
    "trainer.ppo.kl.coef=0.05",
    "trainer.ppo.kl.place=reward",
    "trainer.ppo.kl.reference=initial",
    "trainer.ppo.checkpoint.every_steps=1",
    "trainer.ppo.checkpoint.keep=100",
    "trainer.ppo.checkpoint.export=false",
)


def contents(folder: Path) -> dict[str, str]:
    """Hash the files of a checkpoint's shards."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def trainer_of(launcher: int) -> psutil.Process | None:
    for child in psutil.Process(launcher).children():
        with suppress(psutil.Error):
            if child.cmdline()[-3:-1] == ["trainer", "0"]:
                return child
    return None


def test_killed_trainer_resumes_with_its_critic(site: Site, tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "e2e" / "t")
    (tmp_path / "variety.py").write_text(REWARD)
    environment = ENVIRONMENT | {"PYTHONPATH": str(tmp_path)}
    gate, groups = tmp_path / "gate", 4  # of a batch
    gated.write(gate, groups)
    options = [*OPTIONS, f"trainer.ppo.collector.env.gated.gate={gate}"]
    with spawned(site.command(tmp_path, *options), environment) as run:
        saved = lambda: checkpoint.list_good(paths.checkpoints) or run.poll() is not None  # noqa: E731
        until(saved, what="a checkpoint", seconds=SLOW_S)
        victim = trainer_of(run.pid)
        assert victim is not None
        gated.write(gate, 2 * groups)  # too few to complete the last batch
        victim.kill()
        victim.wait(60)
        held = checkpoint.latest(paths.checkpoints)
        assert held is not None
        before = contents(held)
        gate.unlink()
        shown = run.communicate(timeout=SLOW_S)[0]
    assert run.returncode == 0, shown
    assert "trainer-0 died (killed by SIGKILL); started again" in shown
    assert contents(held) == before
    names = [f"step-{step:06d}" for step in range(1, STEPS + 1)]
    good = checkpoint.list_good(paths.checkpoints)
    assert [path.name for path in good] == names
    assert all((path / "critic" / "state").is_dir() for path in good)
    lines = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    trained = [line for line in lines if "reward/mean" in line]
    assert [line["step"] for line in trained] == list(range(1, STEPS + 1))
    for line in trained:
        assert line["update/count"] == 2
        assert {"critic/loss", "critic/explained_variance", "reward/shaped_mean"} <= line.keys()
        assert line["critic/grad_norm"] > 0
    distances = [line["policy/reference_kl"] for line in trained]
    assert distances[0] == pytest.approx(0.0, abs=1e-9) and distances[-1] > 0.0
    assert audit(paths.ledger).ok
    command = [sys.executable, "-m", "arealite.cli.main", "replay", str(paths.root)]
    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SLOW_S)
    assert again.returncode == 0, again.stderr
    assert f"replayed {STEPS} steps: bitwise equal" in again.stdout, "critic and all"
