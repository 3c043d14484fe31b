"""Ten steps of train.py with an embedded server, for one model of each kind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from arealite.base.trial_files import RunPaths
from arealite.ext.audit.audit import audit
from tests.e2e.conftest import ENVIRONMENT, ROOT, SLOW_S, Finished, all_gone, write_rows
from tests.families.checks import check_names, load
from tests.families.configs import CONFIGS
from tests.families.folders import build, write

pytestmark = [pytest.mark.models, pytest.mark.processes, pytest.mark.timeout(900)]
STEPS = 10
MODELS = "qwen3", "qwen3_moe", "gemma3_text", "deepseek_v3", "gpt_oss", "qwen3_next"
"""Dense; experts by tensor; two ropes and windows; latent attention; sinks; a hybrid."""
IN_PART = {"gemma3_text": pytest.mark.part}
ROUNDING = 1e-3
"""Nats by which trainer and server may differ in float32."""


def train(model: Path, folder: Path) -> Finished:
    """Run train.py with its own server to its end."""
    write_rows(folder / "train.jsonl", 64, seed=1)
    write_rows(folder / "eval.jsonl", 8, seed=2)
    options = {
        "experiment_name": "e2e",
        "trial_name": "t",
        "cluster.name_root": folder / "names",
        "cluster.run_root": folder / "runs",
        "model.path": model,
        "dataset.train": folder / "train.jsonl",
        "dataset.eval": folder / "eval.jsonl",
        "launcher.llm_servers": 1,
        "server_wait_s": SLOW_S,
        "imports": "[tests.families.variety]",
        "trainer.ppo.collector.env.math.reward.type": "characters",
        "trainer.ppo.lr": 1e-3,
        "trainer.ppo.optimizer.warmup_steps": 0,
        "trainer.ppo.max_staleness": 0,
        "trainer.ppo.batch_size": 16,
        "trainer.ppo.collector.group_size": 4,
        "trainer.ppo.collector.concurrency": 32,
        "trainer.ppo.collector.sampling.max_new_tokens": 12,
        "trainer.ppo.eval.sampling.max_new_tokens": 6,
        "trainer.ppo.total_steps": STEPS,
    }
    command = [sys.executable, str(ROOT / "train.py"), *(f"{k}={v}" for k, v in options.items())]
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SLOW_S,
        env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
    )
    all_gone(folder)
    paths = RunPaths(folder / "runs" / "e2e" / "t")
    return Finished(done.returncode, done.stdout + done.stderr, paths)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=IN_PART.get(name, ())) for name in MODELS]
)
def test_ten_steps_train_serve_and_export(name: str, tmp_path: Path) -> None:
    model = write(build(name, CONFIGS[name]), tmp_path / "model")
    done = train(model, tmp_path)
    assert done.code == 0, done.shown + done.logs()
    assert audit(done.paths.ledger).steps == STEPS
    trained = [line for line in done.metrics() if "reward/mean" in line]
    assert len(trained) == STEPS
    for line in trained:
        assert line["update/skipped_update"] == 0.0 and line["mismatch/current_tokens"] > 0
        assert line["mismatch/logprob_abs_diff_max"] < ROUNDING, line["step"]
    check_names(model, done.paths.export)
    load(done.paths.export)
