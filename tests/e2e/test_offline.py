"""Offline runs with real processes: SFT, then PPO, in one command; kills, stop and resume."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from arealite.base import config as base_config
from arealite.base.trial_files import RunPaths
from arealite.ext.audit.audit import audit
from tests.e2e import gated
from tests.e2e.conftest import ENVIRONMENT, ROOT, SLOW_S, Site, all_gone
from tests.e2e.test_replay import REWARD
from tests.models import tiny_model
from tests.waiting import spawned, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200)]

STEPS = 40
"""Steps of a run: 4 in each epoch."""
HELD = """
import time
from pathlib import Path

from arealite.ext.offline.supervised import SFTTrainer
from tests.e2e.gated import opened

GATE, following = Path(__file__).with_name("gate"), SFTTrainer.next_batch


def next_batch(self, step):
    while step >= opened(GATE) and not self.stop.requested:
        time.sleep(0.02)
    return following(self, step)


SFTTrainer.next_batch = next_batch
"""
"""A plugin whose trainers wait at a step that a file sets, until they are stopped."""


def write_answers(file: Path, count: int) -> None:
    """Write sums of digits with their answers."""
    draw = random.Random(3)
    with file.open("w") as output:
        for _ in range(count):
            a, b = draw.randint(1, 9), draw.randint(1, 9)
            output.write(json.dumps({"prompt": f"{a}+{b}=", "completion": str(a + b)}) + "\n")


def test_sft_then_ppo_in_one_command(site: Site, tmp_path: Path) -> None:
    write_answers(tmp_path / "answers.jsonl", 48)
    run_root, answers = tmp_path / "runs", tmp_path / "answers.jsonl"
    run_root.mkdir()
    (run_root / "variety.py").write_text(REWARD)
    done = site.train(
        run_root,
        *("--config", str(ROOT / "config/sft.yaml")),
        *(f"dataset.train={answers}", f"dataset.eval={answers}"),
        *("trainer.offline.lr=1e-2", "trainer.offline.batch_size=16"),
        *("--then", str(ROOT / "config/async_ppo.yaml"), "trainer.ppo.total_steps=2"),
        *(f"dataset.train={site.folder / 'train.jsonl'}", "dataset.eval=null"),
        # Rewards differ, so that each step trains groups; untrained tokens have no mismatch.
        *("imports=[variety]", "trainer.ppo.collector.env.math.reward.type=variety"),
    )
    assert done.code == 0, done.shown + done.logs()
    assert "stage 1 of 2: sft" in done.shown and "stage 2 of 2: async_ppo" in done.shown
    first = RunPaths(run_root / "e2e" / "t-stage1")
    assert not first.ledger.exists() and "no audit" not in done.shown
    losses = [json.loads(line).get("eval/loss") for line in first.metrics.read_text().splitlines()]
    told = [loss for loss in losses if loss is not None]
    assert len(told) == 2 and told[1] < told[0]
    config = base_config.read(done.paths.config)
    assert config.model.path == str(first.export)
    taught, begun = (load_file(path / "model.safetensors") for path in (first.export, site.model))
    assert any(not torch.equal(taught[name], begun[name]) for name in begun)
    assert [line["step"] for line in done.metrics() if "reward/mean" in line] == [1, 2]
    assert audit(done.paths.ledger).ok
    # Version 0 of the second stage is the export of the first, so trainer and server agree.
    assert done.metrics()[0]["mismatch/current_tokens"] > 0
    assert done.metrics()[0]["mismatch/logprob_abs_diff_max_current"] < 1e-4


class Run:
    """An SFT run of two ranks that can be killed, stopped and restarted."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.paths = folder, RunPaths(folder / "runs" / "e2e" / "t")
        folder.mkdir()
        (folder / "held.py").write_text(HELD)
        self.gate = folder / "gate"
        self.environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
        write_answers(folder / "answers.jsonl", 64)
        self.command = [
            *(sys.executable, str(ROOT / "train.py"), "--config", str(ROOT / "config/sft.yaml")),
            *("experiment_name=e2e", "trial_name=t", f"cluster.name_root={folder / 'names'}"),
            *(f"model.path={model}", f"cluster.run_root={folder / 'runs'}"),
            *(f"dataset.train={folder / 'answers.jsonl'}", "launcher.trainer_ranks=2"),
            f"imports=[{folder / 'held.py'}]",
            *("trainer.offline.batch_size=16", f"trainer.offline.epochs={STEPS // 4}"),
            *("trainer.offline.checkpoint_every_steps=20", "trainer.offline.lr=1e-3"),
        ]

    def steps(self, since: float) -> int:
        if not self.paths.metrics.exists():
            return 0
        lines = self.paths.metrics.read_text().splitlines(keepends=True)
        whole = [json.loads(line) for line in lines if line.endswith("\n")]
        return max((line["step"] for line in whole if line["time"] > since), default=0)

    def reaches(self, steps: int, train: subprocess.Popen[str], *, since: float = 0.0) -> None:
        """Wait until a process begun after `since` has trained a step from `steps` on."""
        over = lambda: self.steps(since) >= steps or train.poll() is not None  # noqa: E731
        until(over, what=f"step {steps}", seconds=SLOW_S)
        assert train.poll() is None, (train.stdout.read() if train.stdout else "") + self.logs()

    def is_well(self) -> bool:
        """Return whether `arealite why` lists the ranks and finds no blocking role."""
        why = [sys.executable, "-m", "arealite.cli.main", "why", str(self.paths.root)]
        shown = subprocess.run(why, capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT)
        return shown.returncode == 0 and "trainer-1" in shown.stdout

    def finish(self) -> None:
        done = subprocess.run(
            self.command, env=self.environment, capture_output=True, text=True, timeout=SLOW_S
        )
        assert done.returncode == 0, done.stdout + done.stderr + self.logs()
        all_gone(self.folder)

    def logs(self) -> str:
        return "\n".join(file.read_text()[-2000:] for file in self.paths.logs.glob("*.log"))

    def told(self) -> list[tuple[int, float]]:
        lines = [json.loads(line) for line in self.paths.metrics.read_text().splitlines()]
        return [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]


@pytest.mark.faults
def test_killed_stopped_and_resumed_offline_run_is_equal(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", init_std=0.1)
    whole, harmed = Run(tmp_path / "whole", model), Run(tmp_path / "harmed", model)
    whole.finish()
    gated.write(harmed.gate, 13)
    with spawned(harmed.command, harmed.environment) as train:
        harmed.reaches(12, train)
        until(harmed.is_well, what="a run without blocking roles")
        children = psutil.Process(train.pid).children()
        ranks = [child for child in children if "role" in child.cmdline()]
        os.kill(random.Random(1).choice(ranks).pid, signal.SIGKILL)
        killed = time.time()
        gated.write(harmed.gate, 16)
        harmed.reaches(15, train, since=killed)
        train.send_signal(signal.SIGTERM)
        code, told = train.wait(SLOW_S), train.stdout.read() if train.stdout else ""
    assert code == 130, told + harmed.logs()
    assert "started again (1 of 5)" in told and "stopping after this step" in told
    assert "no audit" not in told and not harmed.paths.export.exists()
    assert len(harmed.told()) < STEPS, "it was stopped before its end"
    harmed.gate.unlink()
    harmed.finish()
    assert harmed.told() == whole.told() and len(whole.told()) == STEPS
    one, other = (load_file(run.paths.export / "model.safetensors") for run in (whole, harmed))
    assert all(torch.equal(one[name], other[name]) for name in one)
