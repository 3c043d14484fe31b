"""`arealite quickstart`: its kit and its command; tests/docs/test_wheel.py runs the whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from arealite.cli import configs
from arealite.cli import main as cli
from arealite.ext.demo import quickstart, sorting


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, int]]:
    kits = list[tuple[Path, int]]()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstart, "make_kit", lambda *words: kits.append(words))
    return kits


def test_quickstart_trains_the_demo_with_its_own_server(
    made: list[tuple[Path, int]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    started = list[list[str]]()
    monkeypatch.setattr(quickstart.train, "main", lambda words: started.append(words) or 0)
    assert cli.main(["quickstart", "--seed", "3", "trainer.ppo.total_steps=2"]) == 0
    kit = Path("runs/demo/kit-seed3")
    assert made == [(kit, 3, None)]
    [config] = configs.parse_stages(started[0], command="c", description="")
    assert (config.seed, config.trainer.ppo.total_steps, config.launcher.llm_servers) == (3, 2, 1)
    assert config.model.path == str(kit / "model")
    assert [config.dataset.train, config.dataset.eval] == [
        f"{kit}/train.jsonl",
        f"{kit}/eval.jsonl",
    ]
    shown = capsys.readouterr().out
    assert f"arealite train {' '.join(started[0])}" in shown
    assert f"arealite report {Path('runs/demo/quickstart').absolute()}" in shown


def test_failed_training_ends_the_quickstart_with_its_code(
    made: list[tuple[Path, int]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(quickstart.train, "main", lambda words: 4)
    assert cli.main(["quickstart"]) == 4
    assert "try next" not in capsys.readouterr().out


def test_kit_alone_starts_no_training(
    made: list[tuple[Path, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart.train, "main", lambda words: pytest.fail("training started"))
    assert cli.main(["quickstart", "--kit", "kit"]) == 0
    assert made == [(Path("kit"), 1, None)]


def test_kit_has_the_files_that_the_quickstart_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sorting, "warm_up", lambda folder, seed: 0.3)
    kit = sorting.make_kit(tmp_path / "kit", 1)
    assert {"model", "train.jsonl", "eval.jsonl"} <= {file.name for file in kit.iterdir()}
