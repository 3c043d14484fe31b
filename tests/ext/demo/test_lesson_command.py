"""`arealite quickstart --model`: its steps and what it writes. The commands are replaced."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from arealite.base.errors import UserError
from arealite.cli import configs
from arealite.cli import main as cli
from arealite.ext.demo import lesson_command
from arealite.ext.demo.lesson import find_lesson
from arealite.ext.demo.lessons import alphabet_sort
from arealite.ext.evaluation.config import EvaluateConfig

SMALL = dataclasses.replace(alphabet_sort.LESSON, train_rows=16, eval_rows=4, demonstrations=8)


class Commands:
    """Replacements of the commands: they note their words and write what the others read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = list[tuple[str, list[str]]]()
        self.codes = {"train": 0, "eval": 0, "report": 0, "audit": 0}
        for name, module in (
            ("train", lesson_command.train),
            ("eval", lesson_command.evaluate),
            ("report", lesson_command.report_command),
            ("audit", lesson_command.audit),
        ):
            monkeypatch.setattr(module, "main", lambda words, name=name: self.call(name, words))

    def call(self, name: str, words: list[str]) -> int:
        self.calls.append((name, words))
        if name == "eval":
            config = configs.parse(EvaluateConfig, words, command="eval", description="")
            share = len(self.calls) / 10
            estimate = {"mean": share, "low": share - 0.05, "high": share + 0.05}
            row = {"reward": estimate, "pass": {"1": estimate}, "parts": {"strict": 0.25}}
            assert config.out is not None
            Path(config.out).write_text(json.dumps({"results": [row]}))
        return self.codes[name]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    return Commands(monkeypatch)


def make_run(tmp_path: Path, **changes: Any) -> lesson_command.LessonRun:
    words = ["trainer.ppo.total_steps=3"]
    changed = dataclasses.replace(SMALL, **changes)
    return lesson_command.LessonRun("sort", changed, model=tmp_path / "model", seed=2, words=words)


def test_lesson_measures_trains_and_measures_again(
    commands: Commands, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    assert run.run() == 0
    names = [name for name, _ in commands.calls]
    assert names == ["eval", "train", "eval", "train", "eval", "report", "audit"]
    warm_start, training = (
        configs.parse_stages(words, command="train", description="")[0]
        for name, words in commands.calls
        if name == "train"
    )
    assert warm_start.trainer.type == "sft"
    assert warm_start.model.path == str(tmp_path / "model")
    assert training.model.path == str(tmp_path / "runs/sort-seed2/warm_start/export")
    assert training.trainer.ppo.total_steps == 3  # the words of the user come last
    assert {warm_start.seed, training.seed} == {2}
    result = json.loads((tmp_path / "runs/sort-seed2/result.json").read_text())
    rewards = {name: found["reward"]["mean"] for name, found in result["measured"].items()}
    assert rewards == {"pretrained": 0.1, "warm start": 0.3, "training": 0.5}
    assert set(result["data"]) == {"train.jsonl", "eval.jsonl", "demonstrations.jsonl"}
    assert result["audit"] == "balanced"
    shown = capsys.readouterr().out
    assert "4 held-out tasks" in shown
    assert "0.500 (0.450 … 0.550)" in shown
    assert "runs/sort-seed2/training/report.html" in shown


def test_parts_of_the_reward_are_shown(
    commands: Commands, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, shown_parts=["strict"], env="tools").run()
    assert "  strict                0.250\n" in capsys.readouterr().out
    words = commands.calls[0][1]
    assert "trainer.ppo.collector.env.type=tools" in words
    assert any(word.startswith("trainer.ppo.collector.env.tools.reward.function") for word in words)


def test_models_are_measured_on_the_same_tasks_with_the_same_options(
    commands: Commands, tmp_path: Path
) -> None:
    make_run(tmp_path).run()
    measured = [words for name, words in commands.calls if name == "eval"]
    own = "model.path=", "name=", "out="
    common = [[word for word in words if not word.startswith(own)] for words in measured]
    assert common[0] == common[1] == common[2]
    assert (
        len({word for words in measured for word in words if word.startswith("model.path=")}) == 3
    )


def test_lesson_without_demonstrations_has_no_warm_start(
    commands: Commands, tmp_path: Path
) -> None:
    assert make_run(tmp_path, demonstrate=None, demonstrations=0).run() == 0
    names = [name for name, _ in commands.calls]
    assert names == ["eval", "train", "eval", "report", "audit"]
    _, words = commands.calls[1]
    assert f'model.path="{tmp_path / "model"}"' in words


@pytest.mark.parametrize("command", ["train", "eval", "audit"])
def test_code_of_a_failed_command_is_the_code_of_the_lesson(
    command: str, commands: Commands, tmp_path: Path
) -> None:
    commands.codes[command] = 4
    assert make_run(tmp_path).run() == 4
    assert commands.calls[-1][0] == command


def test_lesson_that_runs_elsewhere_is_refused_and_its_folder_stays(
    commands: Commands, tmp_path: Path
) -> None:
    run = make_run(tmp_path)
    refusals = list[str]()

    def begin_again(words: list[str]) -> int:
        with pytest.raises(UserError) as refusal:
            make_run(tmp_path).run()
        refusals.append(str(refusal.value))
        return 5

    lesson_command.evaluate.main = begin_again  # the fixture restores it
    assert run.run() == 5
    assert "choose another --seed" in refusals[0]
    visible = [f.name for f in (tmp_path / "runs").iterdir() if not f.name.startswith(".")]
    assert visible == ["sort-seed2"]


def test_interrupted_lesson_says_how_to_continue(
    commands: Commands,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(words: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(lesson_command.train, "main", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_run(tmp_path).run()
    assert "The same command begins again" in capsys.readouterr().out
    result = json.loads((tmp_path / "runs/sort-seed2/result.json").read_text())
    assert list(result["commands"]) == ["evaluation of the pretrained model", "warm start"]


@pytest.mark.parametrize("word", ["cluster.run_root=x", "trainer.ppo.checkpoint.export=false"])
def test_option_that_a_lesson_sets_is_refused_before_the_download(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lesson_command, "fetch", lambda *_: pytest.fail("downloaded"))
    assert cli.main(["quickstart", "--model", "smollm2", word]) == 2
    assert f"{word.partition('=')[0]} is set by the lesson" in capsys.readouterr().err


def test_earlier_run_is_kept_under_another_name(commands: Commands, tmp_path: Path) -> None:
    make_run(tmp_path).run()
    make_run(tmp_path).run()
    names = (folder.name for folder in (tmp_path / "runs").iterdir())
    folders = sorted(name for name in names if not name.startswith("."))
    assert len(folders) == 2
    assert all((tmp_path / "runs" / name / "result.json").exists() for name in folders)


def test_model_with_terms_is_not_downloaded_before_they_are_accepted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lesson_command, "fetch", lambda *_: pytest.fail("downloaded"))
    assert cli.main(["quickstart", "--model", "gemma3-270m"]) == 2
    shown = capsys.readouterr().err
    assert "https://ai.google.dev/gemma/terms" in shown
    assert "--accept-license" in shown


def test_missing_package_is_named_before_the_download(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lesson_command, "fetch", lambda *_: pytest.fail("downloaded"))
    monkeypatch.setattr(lesson_command.gguf_file, "PACKAGES", ("not_installed_at_all",))
    assert cli.main(["quickstart", "--model", "smollm2"]) == 2
    shown = capsys.readouterr().err
    assert "--model smollm2" in shown
    assert "not_installed_at_all" in shown


def test_package_of_a_lesson_is_needed_before_the_download(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lesson_command, "fetch", lambda *_: pytest.fail("downloaded"))
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["quickstart", "--model", "smollm2", "--lesson", "gsm_symbolic"]) == 2
    shown = capsys.readouterr().err
    assert "--lesson gsm_symbolic needs the package reasoning_gym" in shown


def test_file_of_the_user_is_converted_and_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lesson_command, "fetch", lambda *_: pytest.fail("downloaded"))
    monkeypatch.setattr(
        lesson_command.gguf_file,
        "model_folder",
        lambda path: (tmp_path / "converted", f"from {path}"),
    )
    folder = lesson_command.model_folder(
        "smollm2", gguf=tmp_path / "my.gguf", accepts_license=False
    )
    assert folder == tmp_path / "converted"
    assert f"from {tmp_path / 'my.gguf'}" in capsys.readouterr().out


def test_base_model_gets_a_chat_template_beside_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    converted = tmp_path / "converted"
    converted.mkdir()
    monkeypatch.setattr(lesson_command.gguf_file, "model_folder", lambda path: (converted, ""))
    folder = lesson_command.model_folder(
        "gemma3-270m", gguf=tmp_path / "my.gguf", accepts_license=True
    )
    assert (folder / "chat_template.jinja").exists()
    assert not list(converted.iterdir())
    assert "has no chat template" in capsys.readouterr().out


def test_quickstart_with_a_model_runs_the_lesson(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = list[lesson_command.LessonRun]()
    monkeypatch.setattr(lesson_command, "model_folder", lambda name, **options: tmp_path / name)
    monkeypatch.setattr(lesson_command.LessonRun, "run", lambda self: runs.append(self) or 3)
    words = ["quickstart", "--model", "smollm2", "--lesson", "sums", "--seed", "5", "a=1"]
    assert cli.main(words) == 3
    (run,) = runs
    assert run.lesson is find_lesson("sums")
    assert (run.model, run.seed, run.words) == (tmp_path / "smollm2", 5, ["a=1"])
    assert run.folder == Path("runs/sums-seed5")
    gemma = ["quickstart", "--model", "gemma3-270m", "--accept-license", "trainer.ppo.lr=1e-6"]
    cli.main(gemma)
    assert runs[1].words == ["trainer.ppo.lr=4e-6", "trainer.ppo.lr=1e-6"], "the user's is last"


@pytest.mark.parametrize(
    "words", [["--gguf", "file.gguf"], ["--accept-license"], ["--lesson", "sums"]]
)
def test_options_of_a_model_need_a_model(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["quickstart", *words])
    assert "need --model" in capsys.readouterr().err


def test_kit_of_the_tiny_model_is_refused_with_a_pretrained_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["quickstart", "--model", "smollm2", "--kit", "kit"])
    assert "--kit is for the tiny model" in capsys.readouterr().err
