"""`--config NAME`, `arealite presets` and flags of other programs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from arealite.api.experiment_config import ExperimentConfig, ServerConfig
from arealite.base.errors import UserError
from arealite.cli import configs, options
from arealite.cli import main as cli


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("demo", "demo.yaml"),
        ("algo/gspo", "algo/gspo.yaml"),
        ("gspo", "algo/gspo.yaml"),
        ("config/env/code.yaml", "env/code.yaml"),
        ("ppo", "ppo.yaml"),
        ("algo/ppo", "algo/ppo.yaml"),
    ],
)
def test_preset_is_found_by_name_in_any_folder(
    name: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert options.find_config(name) == options.CONFIG_DIR / file


def test_file_of_the_user_wins_over_a_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()  # a folder is no config
    assert options.find_config("demo") == options.CONFIG_DIR / "demo.yaml"
    (tmp_path / "gspo").write_text("seed: 4")
    assert options.find_config("gspo") == Path("gspo")


@pytest.mark.parametrize("name", ["algo/gsppo", "", ".", "../config/demo", "demo/", "DEMO"])
def test_unknown_preset_lists_the_known_ones(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    if Path(name).exists():  # "" and "." are the current folder; reading it fails in one line
        with pytest.raises(UserError, match="not a regular file"):
            configs.parse(ExperimentConfig, ["--config", name], command="c", description="")
        return
    with pytest.raises(UserError, match=r"(?s)Unknown preset.*algo/gspo.*`arealite presets`"):
        options.find_config(name)


def test_presets_of_command_line_and_stages_are_read() -> None:
    words = ["--config", "demo", "--config", "gspo", "model.path=m", "--then", "sft"]
    first, second = configs.parse_stages(words, command="c", description="")
    assert (first.experiment_name, first.trainer.ppo.loss.ratio) == ("demo", "sequence")
    assert second.trainer.type == "sft"


def test_preset_without_config_flag_is_read_like_a_file() -> None:
    lines = (["--config", "demo", "seed=3"], ["demo", "seed=3"])
    one, other = (configs.parse_stages(line, command="train", description="")[0] for line in lines)
    assert asdict(one) == asdict(other)
    assert (other.experiment_name, other.seed) == ("demo", 3)


def test_every_preset_is_listed_with_its_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    files = options.CONFIG_DIR.rglob("*.yaml")
    assert {*rows} == {str(f.relative_to(options.CONFIG_DIR).with_suffix("")) for f in files}
    assert all(len(about.split()) > 3 and "#" not in about for about in rows.values())


def test_one_preset_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets", "gspo"]) == 0
    assert capsys.readouterr().out == (options.CONFIG_DIR / "algo/gspo.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--model", "M"], "Write model.path=M."),
        (["--model=M"], "Write model.path=M."),
        (["--config", "demo", "--dataset", "t.jsonl"], "Write dataset.train=t.jsonl."),
        (["--lr", "1e-5"], "Write trainer.ppo.lr=1e-5 or trainer.offline.lr=1e-5."),
        (["--batch-size", "8"], "trainer.ppo.batch_size=8"),
        (["--trainer.ppo.lr", "2"], "Write trainer.ppo.lr=2."),
        (["--seed"], "Write seed=VALUE."),
    ],
)
def test_flag_of_another_program_is_answered_with_the_override(words: list[str], fix: str) -> None:
    with pytest.raises(UserError) as raised:
        configs.parse_stages(words, command="c", description="")
    assert fix in str(raised.value)
    assert "\n" not in str(raised.value)


def test_flag_of_a_server_command_names_an_option_of_servers() -> None:
    with pytest.raises(UserError, match=r"Write llm_server\.port=8000\."):
        configs.parse(ServerConfig, ["--port", "8000"], command="c", description="")


@pytest.mark.parametrize(
    ("started_as", "name"), [("train.py", "train.py"), ("/usr/bin/arealite", "arealite train")]
)
def test_training_is_called_as_it_was_started(
    started_as: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [started_as])
    with pytest.raises(SystemExit):
        cli.run("arealite.cli.train", ["--help"])
    assert capsys.readouterr().out.startswith(f"usage: {name} ")
