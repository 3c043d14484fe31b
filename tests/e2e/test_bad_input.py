"""What is wrong is found before anything is started: one line with the fix, exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import Site
from tests.models import tiny_model

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.ppo.lrr=1", "Did you mean 'trainer.ppo.lr'?"),
        ("trainer.ppo.lr=fast", "could not be converted to Float"),
        ("model.path=/nowhere", "no Hugging Face model folder"),
        ("dataset.train=/nowhere.jsonl", "/nowhere.jsonl"),
        ("trainer.ppo.collector.group_size=6", "group_size 6 does not divide batch_size 16"),
        ("trainer.ppo.updates=3", "updates 3 does not divide"),
        ("trainer.ppo.batch_size=1024", "a batch needs 256"),
        ("trainer.ppo.collector.agent.type=maths", "Unknown agent type 'maths'"),
        ("trainer.ppo.collector.sampling.max_new_tokens=4096", "leaves no room"),
        ("trainer.type=ppo", "synchronous"),
        ("resume=must", "holds no run"),
        ("imports=[not_there]", "imports=[not_there]"),
    ],
)
def test_one_clear_line(site: Site, tmp_path: Path, override: str, says: str):
    done = site.train(tmp_path, override)
    assert done.code == 2, done.shown
    assert says in done.shown
    assert len(done.shown.strip().splitlines()) == 1
    assert not done.paths.ledger.exists()


def test_no_server(site: Site, tmp_path: Path):
    done = site.train(tmp_path, "trial_name=other", "server_wait_s=0.3")
    assert done.code == 2
    assert "Start one: python3 arealite/launch_llm_server.py" in done.shown


def test_a_server_of_another_model(site: Site, tmp_path: Path):
    other = tiny_model(tmp_path / "other", vocab=72)
    done = site.train(tmp_path / "run", f"model.path={other}")
    assert done.code == 2
    assert "serves another model: its vocab_size is 64" in done.shown


def test_a_prompt_longer_than_the_context_is_named(site: Site, tmp_path: Path):
    rows = [{"prompt": "1+1=", "ground_truth": "2"}] * 8
    rows[5] = {"prompt": "1" * 600, "ground_truth": "1"}
    file = tmp_path / "long.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = site.train(tmp_path / "run", f"dataset.train={file}")
    assert done.code == 2
    assert "row train-5: its prompt has 600 tokens" in done.shown
