"""Flags of `eval` and `collect`: what they set, and what they leave to dotted options."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arealite.cli.main import main
from arealite.ext.evaluation import sampling_run
from arealite.ext.evaluation.config import EvaluateConfig
from arealite.ext.short_flags.short_flags import describe, translate
from arealite.system.names.name_registry import Entry
from tests.ext.evaluation.sampled import Answering, Command, no_servers
from tests.models import tiny_model


@pytest.fixture
def commands(tmp_path: Path, monkeypatch, capsys) -> dict[str, Command]:
    no_servers(monkeypatch)
    monkeypatch.chdir(tmp_path)
    return {name: Command(tmp_path, name, capsys) for name in ("eval", "collect")}


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_flags_become_overrides_that_dotted_options_win_over() -> None:
    argv = ["--config", "a.yaml", "-n", "20", "tasks=3", "--model=M", "-o", "f"]
    words, given = translate(argv, sampling_run.words("eval"))
    assert words == [
        *("model.path=M", "tasks=20", "dataset.eval_rows=20", "out=f"),
        *("--config", "a.yaml", "tasks=3"),
    ]
    assert given == {"--model", "-n --num-episodes", "-o --output"}
    assert translate(["model.path=M", "-x"], sampling_run.words("train")) == (
        ["model.path=M", "-x"],
        set(),
    )
    assert "--environment E" in describe(sampling_run.words("eval"))


def test_environment_flag_evaluates_generated_tasks_in_a_folder_of_its_own(commands) -> None:
    evaluate = commands["eval"]
    words = ["--environment", "reverse", "--num-episodes", "5", "--output", "f", "dataset.eval="]
    assert evaluate(*words, env="letters") == 2, "a dotted env.type wins over the flag"
    assert "generates no tasks" in evaluate.out
    assert evaluate(*words, env="reverse") == 0, evaluate.out
    told = json.loads(Path("f").read_text())
    assert told["results"][0]["samples"] == len(Answering.asked) == 5
    assert (evaluate.folder / "runs/arealite/trial/eval-reverse/samples.sqlite").is_file()


def test_environment_flag_uses_the_dataset_that_is_given(commands) -> None:
    evaluate = commands["eval"]
    evaluate.write({"prompt": "abc"})
    assert evaluate("--environment", "reverse", env="reverse") == 0, evaluate.out
    assert len(Answering.asked) == 1


def test_collect_flags_set_number_file_and_filter(commands) -> None:
    collect = commands["collect"]
    words = ["-n", "3", "-o", "f.jsonl", "--environment", "reverse", "dataset.train=''"]
    assert collect(*words, env="reverse") == 0, collect.out
    assert len(rows(Path("f.jsonl"))) == 3
    assert collect(*words, "--filter-reward", "0.9", env="reverse") == 1, "no row has that reward"
    assert rows(Path("f.jsonl")) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--num-episodes", "many"], "tasks: Value 'many'"),
        (["--num-episodes", "0"], "dataset.eval_rows=0 must be at least 1"),
        (["--environment", "reverze"], "Did you mean 'reverse'"),
        (["--environment", "gymnasium"], "env_id is not set"),
        (["--output", "/nowhere/f", "--environment", "reverse"], "its folder does not exist"),
        (
            ["--environment", "code", "trainer.ppo.collector.env.code.levels=[1,6]"],
            "env.code.levels=(1, 6) must be at least 1 and at most 5",
        ),
        (["--filter-reward", "1"], "unrecognized arguments: --filter-reward"),
    ],
)
def test_wrong_value_of_a_flag_is_refused(commands, words, says, capsys) -> None:
    evaluate = commands["eval"]
    fixed = [f"model.path={evaluate.model}", f"cluster.run_root={evaluate.folder / 'runs'}"]
    try:
        code = main(["eval", *fixed, "trainer.ppo.collector.client.type=scripted", *words])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert says in capsys.readouterr().err
    assert not Answering.asked


def test_model_flag_starts_a_server_only_if_there_is_none(tmp_path: Path, monkeypatch) -> None:
    config = EvaluateConfig()
    config = replace(config, cluster=replace(config.cluster, name_root=str(tmp_path)))
    started = sampling_run.with_defaults(config, {"--model"})
    assert started.launcher.llm_servers == 1
    assert sampling_run.with_defaults(config, set()) == config
    own = replace(config, launcher=replace(config.launcher, llm_servers=2))
    assert sampling_run.with_defaults(own, {"--model"}) == own
    far = replace(config, llm_server=replace(config.llm_server, addresses=["h:1"]))
    assert sampling_run.with_defaults(far, {"--model"}) == far
    live = [Entry(role="llm_server", id="a", value={}, age_s=0.0)]
    monkeypatch.setattr(sampling_run.NameRegistry, "list", lambda *_: live)
    assert sampling_run.with_defaults(config, {"--model"}) == config


@pytest.mark.processes
def test_flags_alone_evaluate_and_collect_with_a_server_of_their_own(tmp_path: Path) -> None:
    tiny_model(tmp_path / "M", max_position_embeddings=1024)
    flags = ["--model", "M", "--environment", "math"]
    for words in (
        ["eval", *flags, "--num-episodes", "3", "--output", "f"],
        ["collect", *flags, "-n", "3", "-o", "f.jsonl", "--filter-reward", "0"],
    ):
        names = f"cluster.name_root={tmp_path / 'names'}"
        ended = subprocess.run(
            [sys.executable, "-m", "arealite.cli.main", *words, names],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert ended.returncode == 0, ended.stderr
        assert "this command starts one" in ended.stderr
    (told,) = json.loads((tmp_path / "f").read_text())["results"][:1]
    assert told["samples"] >= 1
    assert len(rows(tmp_path / "f.jsonl")) == 3
