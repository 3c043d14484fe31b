"""A trainer is killed during a publish; after the run, no staged weights remain."""

from __future__ import annotations

import getpass
import os
import signal
from pathlib import Path

import pytest

from arealite.base.trial_files import TMPFS, RunPaths
from arealite.ext.audit.audit import audit
from tests.e2e import stalled
from tests.e2e.conftest import ENVIRONMENT, SLOW_S, Site, all_gone
from tests.waiting import spawned, until

pytestmark = [pytest.mark.processes, pytest.mark.faults, pytest.mark.timeout(1200)]


def test_no_weights_remain_of_a_trainer_killed_in_a_publish(site: Site, tmp_path: Path) -> None:
    told = tmp_path / "stalled"
    options = [f"imports=[{stalled.FILE}]", "dataset.eval=null", "logger.types=[]"]
    command = site.command(tmp_path, *options, "trainer.ppo.checkpoint.export=false")
    with spawned(command, ENVIRONMENT | {"STALLED": str(told)}) as train:
        until(lambda: told.exists() or train.poll() is not None, what="a publish", seconds=SLOW_S)
        pid, folder = told.read_text().split()
        staged = Path(folder).parent
        assert staged.parent == TMPFS and (Path(folder) / "model.safetensors").exists()
        os.kill(int(pid), signal.SIGKILL)
        shown = train.communicate(timeout=SLOW_S)[0]
    assert train.returncode == 0, shown
    assert "trainer-0 died (killed by SIGKILL); started again (1 of 5)" in shown
    assert not staged.exists(), "its weights"
    ours = site.folder / "names" / getpass.getuser() / "e2e" / "t"
    left = [
        file for file in ours.rglob("*") if file.is_file() and file.name not in (".lock", "secret")
    ]
    assert all("llm_server" in str(file.relative_to(ours)) for file in left), left
    report = audit(RunPaths(tmp_path / "e2e" / "t").ledger)
    assert report.ok and report.steps == 4, report.table()
    all_gone(tmp_path)
