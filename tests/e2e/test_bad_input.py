"""Invalid input is refused before a process starts: one line with the fix, exit code 2."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from arealite.base.trial_files import RunPaths
from arealite.cli import main as cli
from tests.e2e.conftest import Site
from tests.models import tiny_model

pytestmark = pytest.mark.processes


def refused(site: Site, run_root: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run `arealite train` in this process; return its one line after checking that it refused."""
    train = site.command(run_root, *words)[2:]
    assert cli.main(["train", *train]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert len(shown.strip().splitlines()) == 1
    assert not RunPaths(run_root / "e2e" / "t").ledger.exists()
    return shown


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.ppo.lrr=1", "Did you mean 'trainer.ppo.lr'?"),
        ("trainer.ppo.lr=fast", "could not be converted to Float"),
        ("trainer.ppo.staleness_policy=wate", "expected one of ['wait', 'mask', 'drop']"),
        ("trainer.ppo.staleness_policy=pace", "is called wait now"),
        ("model.path=/nowhere", "no Hugging Face model folder"),
        ("dataset.train=/nowhere.jsonl", "/nowhere.jsonl"),
        ("trainer.ppo.collector.group_size=6", "group_size 6 does not divide batch_size 16"),
        ("trainer.ppo.collector.group_size=1", "compares the episodes of a group"),
        ("trainer.ppo.kl.coef=0.1", "trainer.ppo.kl.reference=initial"),
        ("trainer.ppo.kl.reference=/nowhere", "trainer.ppo.kl.reference=/nowhere is no"),
        ("trainer.ppo.epochs=0", "trainer.ppo.epochs=0 must be at least 1"),
        ("trainer.ppo.updates=3", "updates 3 does not divide"),
        ("trainer.ppo.batch_size=1024", "a batch needs 256"),
        ("trainer.ppo.collector.agent.type=maths", "Unknown agent type 'maths'"),
        ("trainer.ppo.collector.sampling.max_new_tokens=4096", "leaves no room"),
        ("trainer.ppo.collector.sampling.temperature=0", "greedy sampling does not explore"),
        ("trainer.ppo.lr=nan", "trainer.ppo.lr=nan must be a number above 0"),
        ("trainer.ppo.collector.episode_timeout_s=0", "must be a number above 0"),
        ("launcher.rollout_workers=0", "must be at least 1"),
        ("launcher.trainer_ranks=0", "must be at least 1"),
        ("logger.level=loud", "expected one of ['debug', 'info', 'warning', 'error']"),
        ("trial_name=../x", "use letters, digits"),
        ("trainer.type=ppo", "synchronous"),
        ("resume=must", "has no run to resume"),
        ("imports=[not_there]", "imports=[not_there]"),
    ],
)
def test_invalid_input_is_a_one_line_error(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, says: str
):
    assert says in refused(site, tmp_path, capsys, override)


def test_invalid_input_of_a_real_process_is_a_one_line_error(site: Site, tmp_path: Path):
    done = site.train(tmp_path, "trainer.ppo.lrr=1")
    assert done.code == 2
    assert done.shown.startswith("error: command line: unknown key 'trainer.ppo.lrr'.")
    assert len(done.shown.splitlines()) == 1


def test_run_without_a_server_is_refused(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    says = refused(site, tmp_path, capsys, "trial_name=other", "server_wait_s=0.3")
    assert "Start one: python3 arealite/launch_llm_server.py" in says


def test_server_of_another_model_is_refused(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    other = tiny_model(tmp_path / "other", vocab=72)
    says = refused(site, tmp_path / "run", capsys, f"model.path={other}")
    assert "serves another model: its vocab_size is 64" in says


def test_prompt_longer_than_the_context_is_refused(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rows = [{"prompt": "1+1=", "ground_truth": "2"}] * 8
    rows[5] = {"prompt": "1" * 600, "ground_truth": "1"}
    file = tmp_path / "long.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    says = refused(site, tmp_path / "run", capsys, f"dataset.train={file}")
    assert "row train-5: its prompt has 600 tokens" in says


def test_full_disk_is_refused(
    site: Site,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    usage = shutil.disk_usage(tmp_path)._replace(free=5 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert "has 5 MiB free" in refused(site, tmp_path, capsys)
