"""`arealite eval`: the printed and written results match the samples; a second run resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from arealite.ext.evaluation.evaluate import show
from tests.ext.evaluation.sampled import Answering, Command, no_servers


@pytest.fixture
def evaluate(tmp_path: Path, monkeypatch, capsys) -> Command:
    no_servers(monkeypatch)
    command = Command(tmp_path, "eval", capsys)
    command.write(
        {"prompt": "ok", "extra_info": {"data_source": "easy"}},
        {"prompt": "ok", "extra_info": {"data_source": "easy"}},
        {"prompt": "ok", "extra_info": {"data_source": "hard"}},
    )
    return command


def result(command: Command, name: str = "eval") -> dict:
    file = command.folder / "runs" / "arealite" / "trial" / name / "eval.json"
    return json.loads(file.read_text())


def test_rewards_and_pass_at_k_are_reported_by_source(evaluate: Command) -> None:
    assert evaluate("n=4", "solved=4") == 0, evaluate.out  # the reward is the answer's length
    told = result(evaluate)
    assert (told["n"], told["versions"], told["failures"], told["failed"]) == (4, [5, 5], {}, {})
    easy, hard = told["results"]
    assert (easy["source"], easy["tasks"], easy["samples"]) == ("easy", 2, 8)
    assert (hard["source"], hard["tasks"], hard["samples"]) == ("hard", 1, 4)
    assert easy["reward"]["mean"] == hard["reward"]["mean"] == 2.5
    assert {k: rate["mean"] for k, rate in easy["pass"].items()} == {
        "1": pytest.approx(0.25),
        "2": pytest.approx(0.5),
        "4": 1.0,
    }
    assert easy["pass"]["1"]["low"] < 0.25 < easy["pass"]["1"]["high"]
    assert hard["reward"]["low"] is None, "one task has no spread"
    assert easy["parts"] == {"length": 1.0, "rare": 0.5}, "a mean of those that gave it"
    assert (easy["tokens"], easy["turns"], easy["truncated"]) == (2.5, 1.0, 0.0)
    for words in ("easy", "hard", "pass@4", "0.250", "8 samples of 2 tasks", "eval.json"):
        assert words in evaluate.out


def test_repeated_command_samples_nothing_again(evaluate: Command) -> None:
    assert evaluate("n=2") == 0
    before, asked = result(evaluate), len(Answering.asked)
    assert evaluate("n=2") == 0
    assert len(Answering.asked) == asked
    assert result(evaluate) == before
    assert evaluate("n=3", "k=[3]", f"out={evaluate.folder / 'other.json'}") == 0
    assert len(Answering.asked) == asked + 3
    other = json.loads((evaluate.folder / "other.json").read_text())
    assert [list(row["pass"]) for row in other["results"]] == [["3"], ["3"]]
    assert result(evaluate) == before


def test_failed_samples_are_reported_and_not_scored(evaluate: Command) -> None:
    evaluate.write({"prompt": "ok"}, {"prompt": "check", "extra_info": {"data_source": "hard"}})
    assert evaluate("n=1", "trainer.ppo.max_attempts=1") == 1
    told = result(evaluate)
    assert [(row["source"], row["tasks"], row["samples"]) for row in told["results"]] == [
        ("", 1, 1)
    ]
    assert told["failures"] == {"reward_timeout": {"attempts": 1, "first": "RewardTimeout: killed"}}
    assert told["failed"] == {"hard": 1}
    assert "1 samples of hard failed; the same command retries them" in evaluate.out


def test_samples_without_a_score_are_counted_and_left_out(evaluate: Command) -> None:
    unscored = {"prompt": "unscored", "extra_info": {"data_source": "b"}}
    evaluate.write({"prompt": "ok"}, {"prompt": "unscored"}, unscored)
    assert evaluate("n=2", "solved=2", "k=[1]") == 0, evaluate.out
    first, second = result(evaluate)["results"]
    assert (first["samples"], first["unscored"], first["reward"]["mean"]) == (4, 1, 1.75)
    assert first["pass"]["1"]["mean"] == 0.75
    assert (second["samples"], second["unscored"], second["reward"]["mean"]) == (2, 1, 2.0)
    assert "4 samples of 2 tasks, 1 without a score" in evaluate.out
    evaluate.write(unscored)
    assert evaluate("n=1", "trial_name=none") == 0, evaluate.out
    file = evaluate.folder / "runs" / "arealite" / "none" / "eval" / "eval.json"
    (only,) = json.loads(file.read_text())["results"]
    assert (only["reward"]["mean"], only["pass"], only["unscored"]) == (None, {}, 1)


def test_results_are_split_by_seat(evaluate: Command) -> None:
    assert evaluate("n=2", env="duel") == 0
    rewards = {
        (row["source"], row["seat"]): row["reward"]["mean"] for row in result(evaluate)["results"]
    }
    assert rewards["easy", "first"] == 1.0
    assert rewards["easy", "second"] == -1.0
    assert "easy, second" in evaluate.out


def test_source_names_are_not_parsed_as_markup(evaluate: Command) -> None:
    evaluate.write({"prompt": "ok", "extra_info": {"data_source": "[/bold]"}})
    assert evaluate() == 0
    assert "[/bold]" in evaluate.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["n=2", "k=[4]"], "pass@4 needs 1 <= k <= n=2"),
        (["dataset.eval=null"], "dataset.eval is not set"),
        (["out=/nowhere/x.json"], "its folder does not exist"),
        (["out=/tmp"], "out=/tmp is a folder. Name"),
        (["m=3"], "unknown key 'm'"),
        (["trainer.ppo.collector.envs.a.weight=1"], "not dataset.train, dataset.eval"),
        (
            ["trainer.ppo.collector.envs.a.weight=1", "dataset.eval=null"],
            "no environment of collector.envs has tasks",
        ),
        (["n=0"], "n=0 must be at least 1"),
        (["model.adapter=some"], "model.adapter=some: servers do not load it"),
        (
            ["trainer.ppo.eval.sampling.max_new_tokens=600"],
            "(for `eval`: trainer.ppo.eval.sampling)",
        ),
    ],
)
def test_invalid_arguments_are_refused(evaluate: Command, words: list[str], says: str) -> None:
    assert evaluate(*words) == 2
    assert says in evaluate.out
    assert not Answering.asked


def test_resume_with_another_config_or_model_is_refused(evaluate: Command) -> None:
    assert evaluate() == 0
    asked = len(Answering.asked)
    for words, says in [
        (["trainer.ppo.eval.sampling.top_p=0.5"], "with sampling.top_p=1.0, now it is 0.5"),
        (["trainer.ppo.collector.agent.type=chat"], "agent.type=math_code_single_step"),
        (["tasks=2"], "with dataset_rows=3, now it is 2"),
    ]:
        assert evaluate(*words) == 2
        assert says in evaluate.out
        assert "choose another name=" in evaluate.out
    weights = evaluate.model / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert evaluate() == 2
    assert "with weights=" in evaluate.out
    assert len(Answering.asked) == asked
    assert evaluate("name=second", "tasks=2") == 0
    assert sum(row["tasks"] for row in result(evaluate, "second")["results"]) == 2


def test_piped_table_has_full_names_and_one_line_per_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mean = {"mean": 0.5, "low": 0.4, "high": 0.6}
    row = {"source": "a source of many words " * 5, "seat": "agent", "tasks": 1, "samples": 2}
    row |= {"reward": mean, "pass": {}, "parts": {"p" * 60: 1.0}, "tokens": 3.0, "truncated": 0.0}
    failures = {"timeout": {"attempts": 3, "first": "it took " + "so " * 40 + "long"}}
    show({"model": "m", "n": 2, "intervals": "", "results": [row], "failures": failures})
    lines = capsys.readouterr().out.splitlines()
    (reward,) = [line for line in lines if " reward " in line]
    assert row["source"].strip() in reward
    assert any("p" * 60 in line for line in lines)
    assert lines[-1] == f"3 × timeout: {failures['timeout']['first']}"


def test_row_with_pass_at_k_has_its_own_number_of_samples(evaluate: Command) -> None:
    evaluate.write(
        {"prompt": "ok"},
        {"prompt": "ok", "extra_info": {"pass@k": 4}},
        {"prompt": "ok", "extra_info": {"pass@k": "many"}},
    )
    assert evaluate("n=2", "solved=4") == 0, evaluate.out
    (row,) = result(evaluate)["results"]
    assert row["samples"] == 2 + 4 + 2
    assert {k: rate["mean"] for k, rate in row["pass"].items()} == {
        "1": pytest.approx(0.25 / 3),
        "2": pytest.approx(0.5 / 3),
        "4": 1.0,
    }
    asked = len(Answering.asked)
    assert evaluate("n=2", "solved=4") == 0
    assert len(Answering.asked) == asked, "all samples are kept"


def test_row_that_the_reward_cannot_score_is_refused_before_sampling(evaluate: Command) -> None:
    assert evaluate(env="math") == 2
    assert "rows.jsonl, line 1: environment math cannot read it: EpisodeError" in evaluate.out
    assert not Answering.asked
