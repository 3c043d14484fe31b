"""The option `resume`: continue a trial, go back to a checkpoint, or start a new run.

The decision uses the ledger and the checkpoints, before any process starts. An ambiguous case is an
error, so that no run silently skips or repeats samples. Files are renamed, never deleted.
"""

import json
import re
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from arealite.api.config import ExperimentConfig, run_paths
from arealite.base import config as base_config
from arealite.base.errors import UserError
from arealite.base.names import RunPaths
from arealite.cli.fold import fold
from arealite.impl.engine import checkpoint
from arealite.system.ledger.ledger import connect, open_read_only
from arealite.system.ledger.schema import SCHEMA_VERSION, VALID_CHECKPOINT


def check_resume(config: ExperimentConfig, identity: Mapping[str, str]) -> None:
    """Check that `resume` is possible with the trial's folder.

    Args:
        config: The run.
        identity: Names and values that must not change within a trial.

    Raises:
        UserError: The checkpoint or the ledger is missing, or the trial has another identity.
    """
    paths = run_paths(config)
    if not re.fullmatch(r"auto|must|never|step-\d+", config.resume):
        raise UserError(f"resume={config.resume}: use auto, must, never, or a checkpoint: step-40.")
    wanted = config.resume
    if wanted.startswith("step-"):
        wanted = f"step-{step_of(wanted):06d}"
    good = [path.name for path in checkpoint.list_good(paths.checkpoints)]
    if wanted == "never":
        return
    hint = f"resume=never starts a new run and renames {paths.root}"
    listed = f"Valid checkpoints in {paths.checkpoints}: {', '.join(good) or 'none'}."
    if wanted not in ("auto", "must", *good):
        raise UserError(f"resume={config.resume} is no valid checkpoint. {listed} {hint}.")
    if wanted == "must" and not good:
        raise UserError(f"resume=must, but {paths.root} has no run to resume. {listed}")
    is_offline = config.trainer.is_offline
    newest = paths.checkpoints / (good or [""])[-1]
    stored, named = read_identity(newest) if is_offline else read_facts(paths.ledger)
    if not stored:
        if good:
            raise UserError(f"{paths.ledger} is missing. {listed} Restore the ledger; or {hint}.")
        return
    _check_identity(stored, identity, paths.root, wanted if wanted in good else "", hint)
    if wanted in ("auto", "must") and named and named > max(map(step_of, good), default=0):
        back = f"resume={good[-1]} goes back to that checkpoint; " if good else ""
        what = f"the run's newest checkpoint, of step {named}, is missing or broken"
        raise UserError(f"{what}. {listed} Restore it; or {back}{hint}.")


def _check_identity(
    stored: Mapping[str, str], identity: Mapping[str, str], root: Path, named: str, hint: str
) -> None:
    """Raise UserError if format or identity differ, or if payloads after `named` were dropped."""
    if (before := stored.get("schema")) != SCHEMA_VERSION:
        formats = f"format {before}, now {SCHEMA_VERSION}"
        what = f"{root} was written by another version of AReaLite ({formats})"
        raise UserError(f"{what}: use that version, choose another trial_name; or {hint}.")
    if named and step_of(named) < (dropped := int(stored.get("dropped", 0))):
        what = f"payloads of steps 1 to {dropped} were dropped (datapipe.keep_payloads)"
        fix = f"Name a checkpoint from step-{dropped:06d} on; or {hint}."
        raise UserError(f"resume={named}: {what}. {fix}")
    for key, now in identity.items():
        if (before := stored.get(key)) != now:
            what = f"{root} was started with {key}={before}, now it is {now}"
            raise UserError(f"{what}. Use {before}, choose another trial_name; or {hint}.")


def read_facts(ledger: Path) -> tuple[dict[str, str], int]:
    """Return (the trial's identity, step of its newest checkpoint); ({}, 0) without a trial."""
    if not ledger.exists():
        return {}, 0
    with open_read_only(ledger) as db:
        if not db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
            return {}, 0  # the datapipe was killed before its first transaction
        stored = dict(db.execute("SELECT key, value FROM meta").fetchall())
        newest = f"SELECT MAX(step) FROM checkpoints WHERE {VALID_CHECKPOINT}"
        return stored, db.execute(newest).fetchone()[0] or 0


def read_identity(path: Path) -> tuple[dict[str, str], int]:
    """Return (identity, step) of an offline trial from its checkpoint; ({}, 0) without one."""
    if not (path / "extra.json").exists():
        return {}, 0
    extra = json.loads((path / "extra.json").read_text())["extra"]
    identity = extra.get("identity", {"trainer.type": "one with a ledger"})
    return {"schema": SCHEMA_VERSION, **identity}, extra["step"]


def move_old_run(config: ExperimentConfig) -> None:
    """Rename the folder of an old run if `resume=never`."""
    paths = run_paths(config)
    if config.resume == "never" and (paths.ledger.exists() or paths.checkpoints.exists()):
        print(f"the old run is now in {paths.root.rename(_backup_folder(paths))}")


def prepare_folder(config: ExperimentConfig) -> ExperimentConfig:
    """Apply `resume=step-…` to the folder; save and return the run's config.

    The returned config has resume=auto, so that restarted roles continue the run.
    """
    paths = run_paths(config)
    if config.resume.startswith("step-"):
        _go_back(paths, step_of(config.resume))
    config = replace(config, resume="auto")
    newest = checkpoint.latest(paths.checkpoints)
    begin = step_of(newest.name) if newest else 0
    if newest:
        total = "" if config.trainer.is_offline else f" of {config.trainer.ppo.total_steps}"
        print(f"resuming after step {begin}{total}", flush=True)
        if paths.config.exists() and (new := [*base_config.changes(paths.config, config)]):
            print(fold(f"changed options: {', '.join(new)}"), flush=True)
    for step, file in paths.starts.items():
        if step > begin:
            file.unlink()
    paths.configs.mkdir(exist_ok=True)
    base_config.save(config, paths.config, paths.configs / f"{begin:06d}.yaml")
    return config


def step_of(name: str) -> int:
    """Return a step that is written as 40, step-40, or as a checkpoint's folder, step-000040.

    Raises:
        UserError: `name` has another form.
    """
    form = re.fullmatch(r"(?:step-)?([0-9]+)", name)
    if form is None:
        raise UserError(f"{name} is no step of a run. Write 40 or step-40.")
    return int(form[1])


def _go_back(paths: RunPaths, step: int) -> None:
    """Rename checkpoints after `step`; the start of the trainer rolls the ledger back."""
    if newer := [path for path in paths.checkpoints.glob("step-*") if step_of(path.name) > step]:
        aside = _backup_folder(paths)
        for path in newer:
            target = aside / path.relative_to(paths.root)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
        print(f"newer checkpoints are now in {aside}")
    if not paths.ledger.exists():
        return  # an offline trial
    with closing(connect(paths.ledger)) as db:
        db.execute("DELETE FROM checkpoints WHERE step > ?", (step,))


def _backup_folder(paths: RunPaths) -> Path:
    return paths.root.with_name(f"{paths.root.name}.before-{time.strftime('%Y%m%d-%H%M%S')}")
