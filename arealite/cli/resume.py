"""The option `resume`: continue a trial, go back to a checkpoint, or start a new run.

The decision uses the ledger and the checkpoints, before any process starts. An ambiguous case is an
error, so that no run silently skips or repeats samples. Files are renamed, never deleted.
"""

import itertools
import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.base import config as base_config
from arealite.base import config_tree
from arealite.base.errors import UserError
from arealite.base.printable import fold
from arealite.base.trial_files import RunPaths, step_of
from arealite.cli import configs
from arealite.impl.engine import checkpoint
from arealite.system.ledger.ledger import check_format, check_identity, connect, open_read_only
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
    selected = config.resume
    if selected == "never":
        return
    if selected.startswith("step-"):
        selected = f"step-{step_of(selected):06d}"
    good = [path.name for path in checkpoint.list_good(paths.checkpoints)]
    hint = f"resume=never starts a new run and renames {paths.root}"
    valid = f"Valid checkpoints in {paths.checkpoints}: {', '.join(good) or 'none'}."
    if selected not in ("auto", "must", *good):
        raise UserError(f"resume={config.resume} is no valid checkpoint. {valid} {hint}.")
    if selected == "must" and not good:
        raise UserError(f"resume=must, but {paths.root} has no run to resume. {valid}")
    stored, recorded_step = _read_stored(config, good)
    if not stored:
        if good:
            raise UserError(f"{paths.ledger} is missing. {valid} Restore the ledger; or {hint}.")
        return
    way_out = f"use that version, choose another trial_name; or {hint}"
    check_format(stored.get("schema"), paths.root, way_out)
    if selected in good:
        _check_payloads(stored, selected, hint)
    check_identity(stored, identity, paths.root, hint)
    newest_step = max(map(step_of, good), default=0)
    if selected in ("auto", "must") and recorded_step > newest_step:
        go_back = f"resume={good[-1]} goes back to that checkpoint; " if good else ""
        raise UserError(
            f"the run's newest checkpoint, of step {recorded_step}, is missing or broken. "
            f"{valid} Restore it; or {go_back}{hint}."
        )


def _read_stored(config: ExperimentConfig, good: Sequence[str]) -> tuple[dict[str, str], int]:
    """Return (the trial's identity, step of its newest checkpoint), from ledger or checkpoint.

    Args:
        config: The run.
        good: Names of the trial's valid checkpoints, by ascending step.
    """
    paths = run_paths(config)
    if not config.trainer.is_offline:
        return read_facts(paths.ledger)
    newest_name = good[-1] if good else ""
    return read_identity(paths.checkpoints / newest_name)


def _check_payloads(stored: Mapping[str, str], selected: str, hint: str) -> None:
    """Check that no payload after checkpoint `selected` was dropped."""
    dropped = int(stored.get("dropped", 0))
    if step_of(selected) < dropped:
        raise UserError(
            f"resume={selected}: "
            f"payloads of steps 1 to {dropped} were dropped (datapipe.keep_payloads). "
            f"Name a checkpoint from step-{dropped:06d} on; or {hint}."
        )


def read_facts(ledger: Path) -> tuple[dict[str, str], int]:
    """Return (the trial's identity, step of its newest checkpoint); ({}, 0) without a trial."""
    if not ledger.exists():
        return {}, 0
    with open_read_only(ledger) as db:
        has_tables = db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
        if not has_tables:
            return {}, 0  # the datapipe was killed before its first transaction
        stored = dict(db.execute("SELECT key, value FROM meta").fetchall())
        select = f"SELECT MAX(step) FROM checkpoints WHERE {VALID_CHECKPOINT}"
        (newest_step,) = db.execute(select).fetchone()
        return stored, newest_step or 0


def read_identity(path: Path) -> tuple[dict[str, str], int]:
    """Return (identity, step) of an offline trial from its checkpoint; ({}, 0) without one."""
    file = path / "extra.json"
    if not file.exists():
        return {}, 0
    extra = json.loads(file.read_text())["extra"]
    identity = extra.get("identity", {"trainer.type": "one with a ledger"})
    return {"schema": SCHEMA_VERSION, **identity}, extra["step"]


def move_old_run(config: ExperimentConfig) -> None:
    """Rename the folder of an old run if `resume=never`."""
    paths = run_paths(config)
    has_run = paths.ledger.exists() or paths.checkpoints.exists()
    if config.resume == "never" and has_run:
        backup = paths.root.rename(_backup_folder(paths))
        print(f"the old run is now in {backup}")


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
        _print_resume(config, begin)
    for step, file in paths.starts.items():
        if step > begin:
            file.unlink()
    paths.configs.mkdir(exist_ok=True)
    base_config.save(config, paths.config, paths.configs / f"{begin:06d}.yaml")
    config_tree.write(config, paths.resolved)
    if config.launcher.llm_servers:
        configs.write_server(config, paths.root)
    return config


def _print_resume(config: ExperimentConfig, begin: int) -> None:
    """Print the step after which the run continues, and the options that changed."""
    of_total = "" if config.trainer.is_offline else f" of {config.trainer.ppo.total_steps}"
    print(f"resuming after step {begin}{of_total}", flush=True)
    saved_config = run_paths(config).config
    if not saved_config.exists():
        return
    changes = [*base_config.changes(saved_config, config)]
    if changes:
        print(fold(f"changed options: {', '.join(changes)}"), flush=True)


def _go_back(paths: RunPaths, step: int) -> None:
    """Rename checkpoints after `step`; the start of the trainer rolls the ledger back."""
    checkpoints = [*paths.checkpoints.glob("step-*")]
    newer = [path for path in checkpoints if step_of(path.name) > step]
    if newer:
        backup = _backup_folder(paths)
        for path in newer:
            target = backup / path.relative_to(paths.root)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
        print(f"newer checkpoints are now in {backup}")
    if not paths.ledger.exists():
        return  # an offline trial
    with closing(connect(paths.ledger)) as db:
        db.execute("DELETE FROM checkpoints WHERE step > ?", (step,))


def _backup_folder(paths: RunPaths) -> Path:
    """Return a folder beside the run's that does not exist, named after the time of day."""
    first = paths.root.with_name(f"{paths.root.name}.before-{time.strftime('%Y%m%d-%H%M%S')}")
    others = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    return next(folder for folder in itertools.chain([first], others) if not folder.exists())
