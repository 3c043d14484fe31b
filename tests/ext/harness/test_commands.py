"""`arealite eval` and `collect` run the agent of a user as training does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from arealite.base.errors import UserError
from arealite.ext.notebook import play_command
from tests.ext.evaluation.sampled import Command, no_servers
from tests.ext.harness.harnesses import AGENTS

HARNESS = "trainer.ppo.collector.env.harness"
ROW = {"prompt": "a", "result": {"reward": 2.0, "right": 1}}


def test_eval_rewards_samples_by_the_agent(tmp_path: Path, monkeypatch, capsys) -> None:
    no_servers(monkeypatch)
    command = Command(tmp_path, "eval", capsys)
    command.write(ROW, ROW)
    assert command(f"{HARNESS}.run={AGENTS}:row", "n=2", env="harness") == 0, command.out
    file = tmp_path / "runs/arealite/trial/eval/eval.json"
    (row,) = json.loads(file.read_text())["results"]
    assert (row["samples"], row["reward"]["mean"], row["parts"]["right"]) == (4, 2.0, 1.0)


def test_collect_writes_the_tokens_of_the_agents_turns(tmp_path: Path, monkeypatch, capsys) -> None:
    no_servers(monkeypatch)
    command = Command(tmp_path, "collect", capsys)
    command.write(ROW)
    out = tmp_path / "out.jsonl"
    words = (f"{HARNESS}.run={AGENTS}:row", "n=2", f"out={out}")
    assert command(*words, env="harness") == 0, command.out
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["tokens"][-len(row["text"]) :] for row in rows] == [[13], [13, 13]]
    assert [row["reward"] for row in rows] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (f"run={AGENTS}:rwo", "Unknown function 'rwo'. Did you mean 'row'?"),
        ("command=[sh,'{reslt}']", "placeholder 'reslt'. Did you mean 'result'? Known: result,"),
    ],
)
def test_wrong_options_of_eval_are_refused_before_sampling(
    option: str, words: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    no_servers(monkeypatch)
    command = Command(tmp_path, "eval", capsys)
    command.write(ROW)
    assert command(f"{HARNESS}.{option}", env="harness") == 2
    assert words in " ".join(command.out.split())


def test_person_cannot_play_in_place_of_the_model() -> None:
    run = "run=tests.ext.harness.agents:number"
    with pytest.raises(UserError, match="needs the model of a run"):
        play_command.main(["harness", run])
