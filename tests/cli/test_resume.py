"""Each value of `resume` with each state of a trial's folder; nothing is deleted."""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.api.trainer_messages import StepReport
from arealite.base.errors import UserError
from arealite.base.trial_files import RunPaths
from arealite.cli import configs, resume
from arealite.impl.engine import checkpoint
from arealite.system.data.dataset import identity
from arealite.system.ledger.ledger import Ledger, connect
from tests.system.scenes import experiment, tasks

ROWS = tasks(5)


@pytest.fixture
def config(tmp_path: Path) -> ExperimentConfig:
    """Return a trial with an empty folder."""
    made = experiment(tmp_path)
    run_paths(made).root.mkdir(parents=True)
    return made


@pytest.fixture
def used(config: ExperimentConfig) -> ExperimentConfig:
    """Return a trial with steps 0 to 6 and checkpoints of steps 2, 4 and 6."""
    paths = run_paths(config)
    ledger = Ledger(paths.ledger, fingerprint=identity(config, ROWS))
    for step in range(7):
        ledger.train(StepReport(step=step, trained=[], metrics={}))
    for step in (2, 4, 6):
        path = paths.checkpoints / f"step-{step:06d}"
        (checkpoint.begin(path) / "weights").write_text("abc")
        checkpoint.commit(path, {"step": step})
        ledger.checkpoint(step, str(path))
    ledger.commit()
    ledger.close()
    return config


def check(config: ExperimentConfig, **changes: Any) -> None:
    changed = replace(config, **changes)
    resume.check_resume(changed, identity(changed, ROWS))


def aside(paths: RunPaths) -> Path:
    (found,) = paths.root.parent.glob(f"{paths.root.name}.before-*")
    return found


@pytest.mark.parametrize("wanted", ["auto", "never"])
def test_auto_and_never_start_in_an_empty_folder(config: ExperimentConfig, wanted: str) -> None:
    check(config, resume=wanted)
    resume.move_old_run(replace(config, resume=wanted))
    settled = resume.prepare_folder(replace(config, resume=wanted))
    assert settled.resume == "auto"
    assert not list(run_paths(config).root.parent.glob("*.before-*"))


@pytest.mark.parametrize("wanted", ["must", "step-000004", "step-4", "Auto", "step-"])
def test_must_and_step_are_refused_in_an_empty_folder(
    config: ExperimentConfig, wanted: str
) -> None:
    with pytest.raises(UserError, match=f"resume={wanted}"):
        check(config, resume=wanted)


def test_trial_killed_before_its_first_transaction_starts(config: ExperimentConfig) -> None:
    connect(run_paths(config).ledger).close()
    check(config)


def test_ledger_without_checkpoints_starts_at_0(config: ExperimentConfig) -> None:
    Ledger(run_paths(config).ledger, fingerprint=identity(config, ROWS)).close()
    check(config)


@pytest.mark.parametrize("wanted", ["auto", "must", "never", "step-000002", "step-000006"])
def test_intact_run_resumes(used: ExperimentConfig, wanted: str) -> None:
    check(used, resume=wanted)


@pytest.mark.parametrize("wanted", ["auto", "must"])
@pytest.mark.parametrize("harm", ["missing", "broken"])
def test_lost_newest_checkpoint_is_an_error(used: ExperimentConfig, wanted: str, harm: str) -> None:
    newest = run_paths(used).checkpoints / "step-000006"
    newest.rename(newest.with_name(".x")) if harm == "missing" else (newest / "weights").unlink()
    with pytest.raises(UserError, match="of step 6, is missing or broken") as raised:
        check(used, resume=wanted)
    said = str(raised.value)
    assert "step-000002, step-000004." in said
    assert "resume=step-000004 goes back" in said and "resume=never starts a new run" in said
    with pytest.raises(UserError, match=r"step-000006 is no valid .*step-000002, step-000004\."):
        check(used, resume="step-000006")
    check(used, resume="step-000004")


def test_impossible_checkpoint_of_an_older_ledger_is_ignored(used: ExperimentConfig) -> None:
    """Older versions stored any checkpoint that a peer named."""
    path = run_paths(used).ledger
    with closing(connect(path)) as db:
        db.execute("INSERT INTO checkpoints VALUES (1000000, '/x')")
    check(used)
    Ledger(path, fingerprint=identity(used, ROWS)).close()
    with closing(connect(path, read_only=True)) as db:
        assert db.execute("SELECT step FROM checkpoints").fetchall() == [(2,), (4,), (6,)]


def test_loss_of_all_checkpoints_is_an_error(used: ExperimentConfig) -> None:
    run_paths(used).checkpoints.rename(run_paths(used).root / "x")
    with pytest.raises(UserError, match=r"Valid checkpoints in .*: none.*resume=never") as raised:
        check(used)
    assert "goes back" not in str(raised.value)


def test_missing_or_unreadable_ledger_is_an_error(used: ExperimentConfig) -> None:
    run_paths(used).ledger.unlink()
    for wanted in ("auto", "must", "step-000004"):
        with pytest.raises(UserError, match=r"ledger.sqlite is missing.*step-000006.*resume=never"):
            check(used, resume=wanted)
    run_paths(used).ledger.write_text("hello, this is no database, and it is long enough")
    with pytest.raises(UserError, match="cannot be read as a ledger"):
        check(used)


def test_resume_with_another_dataset_seed_or_group_size_is_refused(used: ExperimentConfig) -> None:
    with pytest.raises(UserError, match=r"started with seed=1, now it is 2\. Use 1,.*resume=nev"):
        check(used, seed=2)
    ppo = used.trainer.ppo
    groups = replace(ppo, collector=replace(ppo.collector, group_size=4))
    with pytest.raises(UserError, match="started with group_size=2, now it is 4"):
        check(used, trainer=replace(used.trainer, ppo=groups))
    with pytest.raises(UserError, match="started with dataset_rows=5, now it is 6"):
        resume.check_resume(used, identity(used, tasks(6)))
    with pytest.raises(UserError, match="started with dataset_digest="):
        resume.check_resume(used, identity(used, [*ROWS[1:], ROWS[0]]))
    anew = replace(used, seed=2, resume="never")
    resume.check_resume(anew, identity(anew, tasks(6)))


def test_never_moves_the_whole_run_aside(
    used: ExperimentConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = run_paths(used)
    before = sorted(path.relative_to(paths.root) for path in paths.root.rglob("*"))
    resume.move_old_run(replace(used, resume="never"))
    assert not paths.root.exists()
    moved = aside(paths)
    assert sorted(path.relative_to(moved) for path in moved.rglob("*")) == before
    assert str(moved) in capsys.readouterr().out


def test_resume_from_an_earlier_step_moves_newer_checkpoints_aside(
    used: ExperimentConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = run_paths(used)
    (
        paths.checkpoints / "step-000006" / "weights"
    ).unlink()  # a broken checkpoint counts as newer, too
    settled = resume.prepare_folder(replace(used, resume="step-000002"))
    assert settled.resume == "auto"
    assert [path.name for path in checkpoint.list_good(paths.checkpoints)] == ["step-000002"]
    moved = aside(paths) / "checkpoints"
    assert {path.name for path in moved.iterdir()} == {"step-000004", "step-000006"}
    assert str(moved.parent) in capsys.readouterr().out
    check(used)
    assert resume.read_facts(paths.ledger)[1] == 2


def test_two_moves_in_the_same_second_get_two_folders(
    used: ExperimentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = run_paths(used)
    monkeypatch.setattr(time, "strftime", lambda _form: "20261129-193601")
    resume.prepare_folder(replace(used, resume="step-000002"))
    resume.move_old_run(replace(used, resume="never"))
    folders = sorted(paths.root.parent.glob(f"{paths.root.name}.before-*"))
    assert [folder.name for folder in folders] == [
        f"{paths.root.name}.before-20261129-193601",
        f"{paths.root.name}.before-20261129-193601-2",
    ]
    assert (folders[0] / "checkpoints" / "step-000004").is_dir()
    assert (folders[1] / "ledger.sqlite").is_file()


def test_each_start_saves_its_config_under_its_first_step(used: ExperimentConfig) -> None:
    paths = run_paths(used)
    paths.configs.mkdir()
    for step in (0, 2, 5, 6, 9):
        (paths.configs / f"{step:06d}.yaml").write_text("old")
    resume.prepare_folder(replace(used, resume="step-000004"))
    left = {path.stem: path.read_text() == "old" for path in paths.configs.iterdir()}
    assert left == {"000000": True, "000002": True, "000004": False}
    again = configs.load(ExperimentConfig, paths.configs / "000004.yaml", [])
    assert asdict(again) == asdict(configs.load(ExperimentConfig, paths.config, []))
    assert again.resume == "auto"
    assert json.loads((paths.checkpoints / "step-000004" / "manifest.json").read_text())


def test_resumed_run_prints_the_options_that_changed(
    used: ExperimentConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    resume.prepare_folder(used)
    assert "changed" not in capsys.readouterr().out
    resume.prepare_folder(replace(used, seed=7, imports=["mine"]))
    out = " ".join(capsys.readouterr().out.split())
    assert "changed options: " in out
    assert f"seed=7 (was {used.seed})" in out
    assert "imports=['mine'] (was [])" in out
    resume.prepare_folder(replace(used, seed=7, imports=["mine"]))
    assert "changed" not in capsys.readouterr().out


def test_ledger_of_another_format_is_refused(used: ExperimentConfig) -> None:
    db = connect(run_paths(used).ledger)
    db.execute("UPDATE meta SET value = '3' WHERE key = 'schema'")
    db.close()
    with pytest.raises(
        UserError, match=r"by another version of AReaLite \(format 3, now 6\)"
    ) as error:
        check(used)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("wanted", ["auto", "must", "step-000004", "step-000006"])
def test_checkpoint_with_payloads_can_be_resumed(used: ExperimentConfig, wanted: str) -> None:
    drop(used, before=4)
    check(used, resume=wanted)


def test_checkpoint_with_dropped_payloads_is_refused(used: ExperimentConfig) -> None:
    drop(used, before=4)
    says = r"resume=step-000002: payloads of steps 1 to 4 .*from step-000004 on"
    with pytest.raises(UserError, match=says):
        check(used, resume="step-000002")


def drop(config: ExperimentConfig, *, before: int) -> None:
    db = connect(run_paths(config).ledger)
    db.execute("INSERT INTO meta VALUES ('dropped', ?)", (str(before),))
    db.close()


@pytest.mark.parametrize("wanted", ["step-4", "step-04", "step-000004"])
def test_checkpoint_is_named_with_or_without_zeros(used: ExperimentConfig, wanted: str) -> None:
    check(used, resume=wanted)
    resume.prepare_folder(replace(used, resume=wanted))
    good = checkpoint.list_good(run_paths(used).checkpoints)
    assert [path.name for path in good] == ["step-000002", "step-000004"]


def test_unknown_checkpoint_without_zeros_is_refused_as_written(used: ExperimentConfig) -> None:
    with pytest.raises(UserError, match=r"resume=step-5 is no valid .*step-000002, step-000004"):
        check(used, resume="step-5")


@pytest.mark.parametrize("wanted", ["4", "step-4.0", "step-", "step--4", "step-4 "])
def test_other_form_of_a_checkpoint_is_refused_with_the_form_to_write(
    used: ExperimentConfig, wanted: str
) -> None:
    with pytest.raises(UserError, match="use auto, must, never, or a checkpoint: step-40"):
        check(used, resume=wanted)
