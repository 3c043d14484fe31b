"""`arealite launch` without a cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from arealite.api.experiment_config import ExperimentConfig
from arealite.cli import main, resolved


def test_print_needs_no_slurm_and_writes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["launch", "slurm", f"cluster.run_root={tmp_path / 'runs'}", "--print"]
    assert main.main(words) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n# arealite/trial")
    assert not (tmp_path / "runs").exists()
    assert main.main(words[:-1]) == 2
    assert capsys.readouterr().err.startswith("error: sbatch is not installed. ")


def test_slurm_launch_file_is_a_job_of_four_parts(capsys: pytest.CaptureFixture[str]):
    file = Path(__file__).parents[3] / "launchers" / "slurm.yaml"
    assert main.main(["launch", "slurm", str(file), "--print"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line in ("# head", "# servers", "# workers", "# trainers")]
    assert lines.count("#SBATCH hetjob") == 3 and lines.count("#SBATCH --gres=gpu:8") == 2


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), ([], 2), (["pbs"], 2)])
def test_missing_or_unknown_cluster_shows_the_usage(
    words: list[str], code: int, capsys: pytest.CaptureFixture[str]
):
    assert main.main(["launch", *words]) == code
    said = capsys.readouterr()
    assert "usage: arealite launch slurm|" in said.out + said.err


def test_host_auto_becomes_this_hosts_address(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resolved, "own_address", lambda: "10.0.0.7")
    given = ExperimentConfig()
    assert resolved.resolve_host(given) is given
    auto = replace(given, cluster=replace(given.cluster, host="auto"))
    assert resolved.resolve_host(auto).cluster.host == "10.0.0.7"
