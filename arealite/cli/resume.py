"""What `resume` makes of what a trial's folder holds: go on, go back to a checkpoint, begin anew.

Decided before anything starts, from the ledger and the checkpoints: a run that skips, repeats or
begins anew in silence is worse than one that does not start. Nothing is deleted, only moved aside.
"""

from __future__ import annotations

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
from arealite.impl.engine import checkpoint
from arealite.system.ledger.ledger import connect, open_read_only
from arealite.system.ledger.schema import SCHEMA_VERSION, VALID_CHECKPOINT


def check_resume(config: ExperimentConfig, identity: Mapping[str, str]) -> None:
    """Refuse what `resume` cannot do, or must not do unasked, with what is there.

    `identity` is what must not change within a trial, by name.
    """
    wanted, paths = config.resume, run_paths(config)
    if not re.fullmatch(r"auto|must|never|step-\d+", wanted):
        raise UserError(f"resume={wanted}: use auto, must, never, or a checkpoint: step-000040.")
    good = [path.name for path in checkpoint.list_good(paths.checkpoints)]
    if wanted == "never":
        return
    anew = f"resume=never begins anew and moves what is in {paths.root} aside"
    listed = f"Good checkpoints in {paths.checkpoints}: {', '.join(good) or 'none'}."
    if wanted not in ("auto", "must", *good):
        raise UserError(f"resume={wanted} is no good checkpoint. {listed} {anew}.")
    if wanted == "must" and not good:
        raise UserError(f"resume=must, but {paths.root} holds no run to go on with. {listed}")
    is_offline, newest = config.trainer.is_offline, paths.checkpoints / (good or [""])[-1]
    held, named = read_identity(newest) if is_offline else read_facts(paths.ledger)
    if not held:
        if good:
            raise UserError(f"{paths.ledger} is gone. {listed} Put the ledger back; or {anew}.")
        return
    _check_begun(held, identity, paths.root, wanted if wanted in good else "", anew)
    if wanted in ("auto", "must") and named and named > max(map(step_of, good), default=0):
        back = f"resume={good[-1]} goes back to that one; " if good else ""
        raise UserError(
            f"the run's newest checkpoint, of step {named}, is missing or broken. {listed} Put it "
            f"back; or {back}{anew}."
        )


def _check_begun(
    held: Mapping[str, str], identity: Mapping[str, str], root: Path, named: str, anew: str
) -> None:
    """Refuse a trial of another format or identity, or one without the payloads for `named`."""
    if (before := held.get("schema")) != SCHEMA_VERSION:
        raise UserError(
            f"{root} was written by another AReaLite (format {before}, now {SCHEMA_VERSION}): go "
            f"on with that one, choose another trial_name; or {anew}."
        )
    if named and step_of(named) < (dropped := int(held.get("dropped", 0))):
        raise UserError(
            f"resume={named}: payloads of steps 1 to {dropped} were dropped (datapipe."
            f"keep_payloads). Name a checkpoint from step-{dropped:06d} on; or {anew}."
        )
    for key, now in identity.items():
        if (before := held.get(key)) != now:
            raise UserError(
                f"{root} was begun with {key}={before}, now it is {now}. Put {before} back, "
                f"choose another trial_name; or {anew}."
            )


def read_facts(ledger: Path) -> tuple[dict[str, str], int]:
    """Return (what the trial was begun with, step of its newest checkpoint); ({}, 0): no trial."""
    if not ledger.exists():
        return {}, 0
    with open_read_only(ledger) as db:
        if not db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
            return {}, 0  # killed before its first transaction
        held = dict(db.execute("SELECT key, value FROM meta").fetchall())
        newest = f"SELECT MAX(step) FROM checkpoints WHERE {VALID_CHECKPOINT}"
        return held, db.execute(newest).fetchone()[0] or 0


def read_identity(path: Path) -> tuple[dict[str, str], int]:
    """Return the same of an offline trial, from a checkpoint; ({}, 0): there is none."""
    if not (path / "extra.json").exists():
        return {}, 0
    extra = json.loads((path / "extra.json").read_text())["extra"]
    begun = extra.get("identity", {"trainer.type": "one with a ledger"})
    return {"schema": SCHEMA_VERSION, **begun}, extra["step"]


def begin_anew(config: ExperimentConfig) -> None:
    """Move a used folder aside as a whole, where `resume=never` asks for it."""
    paths = run_paths(config)
    if config.resume == "never" and (paths.ledger.exists() or paths.checkpoints.exists()):
        print(f"the run that was here is now in {paths.root.rename(_aside(paths))}")


def settle(config: ExperimentConfig) -> ExperimentConfig:
    """Go back where `resume` names a checkpoint; note the config, under which restarts go on."""
    paths = run_paths(config)
    if config.resume.startswith("step-"):
        _go_back(paths, step_of(config.resume))
    config = replace(config, resume="auto")
    newest = checkpoint.latest(paths.checkpoints)
    begin = step_of(newest.name) if newest else 0
    if newest:
        total = "" if config.trainer.is_offline else f" of {config.trainer.ppo.total_steps}"
        print(f"going on after step {begin}{total}", flush=True)
    for step, file in paths.starts.items():
        if step > begin:
            file.unlink()
    paths.configs.mkdir(exist_ok=True)
    for file in (paths.config, paths.configs / f"{begin:06d}.yaml"):
        base_config.save(config, file)
    return config


def step_of(name: str) -> int:
    """Return the step of a checkpoint's folder."""
    return int(name.removeprefix("step-"))


def _go_back(paths: RunPaths, step: int) -> None:
    """Forget checkpoints after `step`; the trainer's start rolls the rest of the ledger back."""
    every = paths.checkpoints.glob("step-*")
    if newer := [path for path in every if step_of(path.name) > step]:
        aside = _aside(paths)
        for path in newer:
            target = aside / path.relative_to(paths.root)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
        print(f"newer checkpoints are now in {aside}")
    if not paths.ledger.exists():
        return  # an offline trial
    with closing(connect(paths.ledger)) as db:
        db.execute("DELETE FROM checkpoints WHERE step > ?", (step,))


def _aside(paths: RunPaths) -> Path:
    return paths.root.with_name(f"{paths.root.name}.before-{time.strftime('%Y%m%d-%H%M%S')}")
