"""Segments of a run for its replay, and runs that cannot be replayed; tests/e2e runs a replay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from arealite.api.experiment_config import ExperimentConfig, ModelConfig
from arealite.api.trainer_messages import StepReport
from arealite.base import config as base_config
from arealite.base.trial_files import RunPaths
from arealite.cli import main as cli
from arealite.ext.replay.command import StepRange, segments
from arealite.system.ledger.ledger import Ledger, connect

Make = Callable[..., RunPaths]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Write a run: ranks of each step, and the steps at which it was started."""

    def build(
        *ranks: int, starts: tuple[int, ...] = (0,), same: bool = False, fingerprint: str = "ab"
    ) -> RunPaths:
        paths, model = RunPaths(tmp_path / "run"), tmp_path / "model"
        paths.configs.mkdir(parents=True)
        model.mkdir()
        (model / "config.json").touch()
        config = replace(ExperimentConfig(), model=ModelConfig(path=str(model)))
        base_config.save(config, paths.config)
        for n in starts:
            begun = config if same else replace(config, server_wait_s=float(n))
            base_config.save(begun, paths.configs / f"{n:06d}.yaml")
        ledger = Ledger(paths.ledger, fingerprint={})
        for step, count in enumerate(ranks):
            ledger.train(
                StepReport(step=step, trained=[], metrics={}, ranks=count, fingerprint=fingerprint)
            )
        ledger.commit()
        ledger.close()
        return paths

    return build


def test_constant_number_of_ranks_is_one_segment(make: Make) -> None:
    paths = make(2, 2, 2)
    config = paths.configs / "000000.yaml"
    assert segments(paths, None) == [StepRange(config=config, ranks=2, stop=3)]
    assert segments(paths, 2) == [StepRange(config=config, ranks=2, stop=2)]
    assert segments(paths, 9) == [StepRange(config=config, ranks=2, stop=3)]


def test_changed_ranks_or_config_start_a_segment(make: Make) -> None:
    paths = make(1, 1, 1, 2, 2, 2, starts=(0, 2, 4))
    first, second, third = (paths.configs / f"{n:06d}.yaml" for n in (0, 2, 4))
    assert segments(paths, None) == [
        StepRange(config=first, ranks=1, stop=2),
        StepRange(config=second, ranks=1, stop=3),
        StepRange(config=second, ranks=2, stop=4),
        StepRange(config=third, ranks=2, stop=6),
    ]
    assert segments(paths, 3)[-1] == StepRange(config=second, ranks=1, stop=3)


def test_restart_without_changes_starts_no_segment(make: Make) -> None:
    paths = make(1, 1, 1, starts=(0, 2), same=True)
    assert segments(paths, None) == [
        StepRange(config=paths.configs / "000000.yaml", ranks=1, stop=3)
    ]


def test_run_of_a_version_with_other_options_is_replayed(make: Make) -> None:
    paths = make(1)
    file = paths.configs / "000000.yaml"
    text = file.read_text()
    older = text.replace("cluster:\n", "cluster:\n  name_store: etcd\n  etcd: h1:2379\n")
    assert older != text
    file.write_text(older)
    assert segments(paths, None) == [StepRange(config=file, ranks=1, stop=1)]


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda paths: paths.ledger.unlink(), "no ledger at"),
        (lambda paths: (paths.root.parent / "model" / "config.json").unlink(), "is missing"),
    ],
)
def test_missing_ledger_or_model_is_a_one_line_error(
    make: Make, harm: Callable[[RunPaths], None], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = make(1)
    harm(paths)
    assert cli.main(["replay", str(paths.root)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_run_without_steps_is_refused(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(make().root)]) == 2
    assert "has no trained step" in capsys.readouterr().err


def test_run_without_fingerprints_is_refused(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", str(make(1, 1, fingerprint="").root)]) == 2
    assert "step 1 of" in capsys.readouterr().err


def test_run_with_dropped_payloads_is_refused(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = make(1, 1, 1)
    with closing(connect(paths.ledger)) as db:
        db.execute("INSERT INTO meta VALUES ('dropped', '2')")
    assert cli.main(["replay", str(paths.root)]) == 2
    shown = capsys.readouterr().err
    assert "payloads of steps 1 to 2 were dropped (datapipe.keep_payloads)" in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize("step", ["2", "step-2", "step-000002"])
def test_last_step_is_a_number_or_the_name_of_a_checkpoint(
    make: Make, step: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run_ranks(segment: StepRange, _: object) -> int:
        return 0 if segment.stop == 2 else 1

    monkeypatch.setattr("arealite.ext.replay.command.run_ranks", run_ranks)
    paths = make(1, 1, 1)
    assert cli.main(["replay", str(paths.root), "--to", step]) == 0
    assert "replayed 2 steps" in capsys.readouterr().out
    assert cli.main(["replay", str(paths.root), "--to", "step-x"]) == 2
    assert "step-x is no step of a run. Write 40 or step-40." in capsys.readouterr().err
