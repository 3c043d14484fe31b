"""The words of `train` that are no config keys, and the help of commands that take overrides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from arealite.cli import main as cli
from arealite.cli.completion import ROOTS
from tests.models import tiny_model


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Make a run that needs no server: two rows of supervised training."""
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
    ]


def test_a_dry_run_checks_and_starts_nothing(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "--dry-run", *words]) == 0
    assert capsys.readouterr().out == "all checks passed; nothing was started\n"
    assert not (tmp_path / "names").exists()
    assert not [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert cli.main(["train", *words, "dataset.train=gone.jsonl", "--dry-run"]) == 2
    assert "gone.jsonl" in capsys.readouterr().err
    etcd = ["cluster.name_store=etcd", "cluster.etcd=127.0.0.1:9"]
    assert cli.main(["train", *words, *etcd, "--dry-run"]) == 2
    assert "cluster.etcd=127.0.0.1:9: no etcd answers" in capsys.readouterr().err


def test_resume_is_resume_must(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", *words, "--resume", "--dry-run"]) == 2
    assert "resume=must, but" in capsys.readouterr().err
    assert cli.main(["train", *words, "--resume", "--then", "config/async_ppo.yaml"]) == 2
    assert "leave it out" in capsys.readouterr().err


@pytest.mark.parametrize("command", [name for names in ROOTS.values() for name in names])
def test_help_shows_every_key_with_its_words(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["slurm"] if command == "launch" else []
    with pytest.raises(SystemExit) as ended:
        cli.main([command, *more, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "cluster.name_store=file\n      where names are kept" in shown
