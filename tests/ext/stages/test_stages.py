"""Several --config files, and stages separated by --then."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.base.errors import UserError
from arealite.cli import options, train
from arealite.ext.stages.stages import load_stages, split

Write = Callable[[str, dict[str, Any]], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def make(name: str, content: dict[str, Any]) -> Path:
        file = tmp_path / f"{name}.yaml"
        file.write_text(json.dumps(content))  # JSON is YAML
        return file

    return make


def parse(*argv: str | Path) -> list[options.Layers]:
    line = options.CommandLine(
        command="train.py", description="", schema=ExperimentConfig, default=Path("default.yaml")
    )
    return split(line, [str(word) for word in argv])


def load(*argv: str | Path) -> list[ExperimentConfig]:
    return load_stages(parse(*argv))


def test_then_splits_the_command_line_into_stages() -> None:
    assert parse("a=1") == [options.Layers(files=[Path("default.yaml")], overrides=["a=1"])]
    assert parse("a=1", "--config", "x.yaml", "b=2", "--config=y.yaml") == [
        options.Layers(files=[Path("x.yaml"), Path("y.yaml")], overrides=["a=1", "b=2"])
    ]
    assert parse("a=1", "--then", "x.yaml", "--config", "y.yaml", "b=2", "--then=z.yaml") == [
        options.Layers(files=[Path("default.yaml")], overrides=["a=1"]),
        options.Layers(files=[Path("x.yaml"), Path("y.yaml")], overrides=["b=2"]),
        options.Layers(files=[Path("z.yaml")], overrides=[]),
    ]


@pytest.mark.parametrize("argv", [["--then"], ["--the", "x"], ["--conf", "x"]])
def test_incomplete_option_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(*argv)
    assert caught.value.code == 2 and "usage: train.py" in capsys.readouterr().err


def test_help_describes_stages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    shown = capsys.readouterr().out
    assert "--then" in shown and "-stage1" in shown and "trainer.dpo.beta=0.1" in shown


def test_later_files_override_earlier_ones_and_overrides_override_files(write: Write) -> None:
    one = write("one", {"seed": 5, "trainer": {"type": "sft", "ppo": {"lr": 1.0}}})
    two = write("two", {"seed": 6, "trainer": {"ppo": {"batch_size": 8}}})
    (config,) = load("--config", one, "--config", two, "trainer.ppo.lr=2.0")
    assert (config.seed, config.trainer.type, config.trainer.ppo.batch_size) == (6, "sft", 8)
    assert config.trainer.ppo.lr == 2.0
    (config,) = load("--config", two, "--config", one)
    assert config.seed == 5 and config.trial_name == "trial"


def test_imports_come_from_the_last_layer_that_sets_them(
    write: Write, tmp_path: Path, monkeypatch: Any
):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "stage_plugin.py").write_text("")
    one = write("one", {"imports": ["stage_plugin"]})
    two = write("two", {"seed": 6})
    (config,) = load("--config", one, "--config", two)
    assert config.imports == ["stage_plugin"]
    with pytest.raises(UserError, match="no module of that name"):
        load("--config", one, "--config", two, "imports=[absent_plugin]")


def test_stages_share_the_first_overrides_and_pass_the_model_on(write: Write) -> None:
    sft, dpo, ppo = (write(kind, {"trainer": {"type": kind}}) for kind in ("sft", "dpo", "ppo"))
    first, second, third = load(
        *("--config", sft, "model.path=/m", "dataset.train=a", "trial_name=t", "seed=4"),
        *("--then", dpo, "dataset.train=b", "seed=5"),
        *("--then", ppo, "trainer.ppo.max_staleness=0"),
    )
    assert [stage.trainer.type for stage in (first, second, third)] == ["sft", "dpo", "ppo"]
    assert [stage.trial_name for stage in (first, second, third)] == ["t-stage1", "t-stage2", "t"]
    assert [stage.dataset.train for stage in (first, second, third)] == ["a", "b", "a"]
    assert [stage.seed for stage in (first, second, third)] == [4, 5, 4]
    assert first.model.path == "/m"
    assert second.model.path == str(run_paths(first).export)
    assert third.model.path == str(run_paths(second).export)


def test_stage_keeps_its_own_model_path(write: Write) -> None:
    sft = write("sft", {"trainer": {"type": "sft"}})
    named = write("named", {"model": {"path": "/other"}})
    assert load("--config", sft, "model.path=/m", "--then", named)[1].model.path == "/other"
    assert load("--config", sft, "--then", sft, "model.path=/x")[1].model.path == "/x"


def test_reward_model_stage_does_not_change_the_policy(write: Write) -> None:
    sft, reward = (write(kind, {"trainer": {"type": kind}}) for kind in ("sft", "reward"))
    stages = load("--config", sft, "model.path=/m", "--then", reward, "--then", sft)
    assert stages[2].model.path == stages[1].model.path == str(run_paths(stages[0]).export)
    stages = load("--config", reward, "model.path=/m", "--then", sft)
    assert stages[1].model.path == "/m"


def test_stage_without_an_export_is_refused(write: Write) -> None:
    ppo = write("ppo", {"trainer": {"ppo": {"checkpoint": {"export": False}}}})
    with pytest.raises(UserError, match="stage 2 has no model"):
        load("--config", ppo, "model.path=/m", "--then", ppo)
    assert load("--config", ppo, "model.path=/m", "--then", ppo, "model.path=/x")


def test_error_in_a_later_stage_is_found_before_the_first_runs(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(train, "run", lambda config: ran.append(config.trial_name) or 0)
    sft = str(write("sft", {"trainer": {"type": "sft"}}))
    for wrong in ("trainer.offline.epochs=0", "trainer.offline.epoch=1", "logger.types=[x]"):
        with pytest.raises(UserError):
            train.main(["--config", sft, "--then", sft, wrong])
    assert ran == []
    assert train.main(["--config", sft, "--then", sft]) == 0
    assert ran == ["trial-stage1", "trial"]
    monkeypatch.setattr(train, "run", lambda config: ran.append("") or 130)
    assert train.main(["--config", sft, "--then", sft]) == 130
    assert len(ran) == 3, "a stage that did not end well has no successor"
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="one command per stage"):
        train.main(["--config", sft, "--then", sft])
