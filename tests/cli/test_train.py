"""Arguments of `train` that are not config keys, and the help of commands with overrides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from arealite.api.experiment_config import ExperimentConfig, name_dir, run_paths
from arealite.api.trial import ClusterConfig
from arealite.base.config import save
from arealite.cli import main as cli
from tests.models import tiny_model
from tests.system.health.living import show
from tests.waiting import spawned, until

TAKE_OVERRIDES = "train", "check", "launch", "serve-llm", "info", "serve", "eval", "collect"
"""Commands whose arguments are config keys."""


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Create a run that needs no server: supervised training with two rows."""
    rows = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "1+2=", "completion": "3"}]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"model.path={tiny_model(tmp_path / 'model')}",
        f"dataset.train={data}",
        f"cluster.name_root={tmp_path / 'names'}",
        f"cluster.run_root={tmp_path / 'runs'}",
        "trainer.type=sft",
        "trainer.offline.batch_size=2",
        "trainer.offline.optimizer.warmup_steps=0",
    ]


def test_dry_run_checks_and_starts_nothing(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "--dry-run", *words]) == 0
    assert capsys.readouterr().out == "all checks passed; nothing was started\n"
    assert not (tmp_path / "names").exists()
    assert not [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert cli.main(["train", *words, "dataset.train=gone.jsonl", "--dry-run"]) == 2
    assert "gone.jsonl" in capsys.readouterr().err
    assert cli.main(["train", *words, "cluster.name_store=etcd", "--dry-run"]) == 2
    assert "unknown key 'cluster.name_store'" in capsys.readouterr().err


def test_option_resume_sets_resume_must(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *words, "--resume", "--dry-run"]) == 2
    assert "resume=must, but" in capsys.readouterr().err
    assert cli.main(["train", *words, "--resume", "--then", "config/async_ppo.yaml"]) == 2
    assert "Stages resume without it: remove it" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.timeout(1200)
def test_run_trains_without_asserts(words: list[str], tmp_path: Path) -> None:
    """The roles inherit PYTHONOPTIMIZE=1 (python -O)."""
    line = [sys.executable, "-m", "arealite", "train", *words]
    environment = os.environ | {"PYTHONOPTIMIZE": "1"}
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("run folder: ")


@pytest.mark.parametrize("command", TAKE_OVERRIDES)
def test_help_lists_every_key_with_its_description(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["slurm"] if command == "launch" else []
    with pytest.raises(SystemExit) as ended:
        cli.main([command, *more, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "cluster.run_root=runs\n      folder of all runs" in shown


CHECKS = """
import sys, time
from pathlib import Path
from arealite.base.errors import UserError
from arealite.cli import main, preflight
def gated(config, **_):
    Path(sys.argv[1], "checking").touch()
    while not Path(sys.argv[1], "go").exists():
        time.sleep(0.01)
    raise UserError("so it is refused")
preflight.preflight = gated
sys.exit(main.main(["train", *sys.argv[2:]]))
"""


@pytest.mark.parametrize("is_resumed", [False, True])
def test_why_shows_a_launcher_that_checks_its_config(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], is_resumed: bool
) -> None:
    config = ExperimentConfig(
        cluster=ClusterConfig(name_root=str(tmp_path / "names"), run_root=str(tmp_path / "runs"))
    )
    root, vitals = run_paths(config).root, name_dir(config) / "vitals"
    if is_resumed:  # files of an earlier launcher
        root.mkdir(parents=True)
        vitals.mkdir(parents=True)
        save(config, run_paths(config).config)
        show(vitals, "launcher-0", started=1, age_s=100.0)
    command = [sys.executable, "-c", CHECKS, str(tmp_path), *words]
    with spawned(command, dict(os.environ)) as launcher:
        until((tmp_path / "checking").exists, what="the check")
        assert cli.main(["why", str(root)]) == 0
        said = f"process {launcher.pid} checks the config of the run; it has started no role yet.\n"
        assert capsys.readouterr().out == said
        assert cli.main(["train", *words]) == 2
        assert f"in use by process {launcher.pid}" in capsys.readouterr().err
        (tmp_path / "go").touch()
        assert launcher.wait(60) == 2
    assert root.exists() == is_resumed, "what is refused leaves nothing behind"
    assert cli.main(["why", str(root)]) == (0 if is_resumed else 2)
