"""Runs with the environment variables of a Kubernetes PyTorchJob: one rank in each pod."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from arealite.base.trial_files import RunPaths
from arealite.ext.audit.audit import audit
from arealite.impl.launcher.processes import free_port
from tests.e2e.conftest import ENVIRONMENT, SLOW_S, Site, all_gone

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("size", [1, 2])
def test_run_of_a_pytorchjob_trains_and_is_balanced(site: Site, tmp_path: Path, size: int) -> None:
    steps = ["trainer.ppo.total_steps=2", "dataset.eval=null", "logger.types=[]"]
    command = site.command(tmp_path, *steps)
    job = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    pods = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env=ENVIRONMENT | job | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = [pod.communicate(timeout=SLOW_S)[0] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
            pod.wait()
    assert [pod.returncode for pod in pods] == [0] * size, outputs
    if size > 1:
        first_lines = [output.splitlines()[0] for output in outputs]
        where = f"at 127.0.0.1:{job['MASTER_PORT']}"
        for rank, line in enumerate(first_lines):
            assert line == f"rank {rank} of 2 waits up to 300 s for the other ranks, {where}"
    paths = RunPaths(tmp_path / "e2e" / "t")
    report = audit(paths.ledger)
    assert report.ok and report.steps == 2, report.table()
    lines = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines if "reward/mean" in line] == [1, 2]
    (manifest,) = paths.checkpoints.glob("*/manifest.json")
    assert json.loads(manifest.read_text())["world_size"] == size
    all_gone(tmp_path)
