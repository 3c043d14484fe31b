"""Checkpoints of all engines of a trainer: the policy's folder, and the critic's inside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arealite.api.config import ExperimentConfig, run_paths
from arealite.api.engine import TrainEngine
from arealite.base import log
from arealite.base.errors import UserError
from arealite.impl.engine import checkpoint
from arealite.impl.trainer.world import World

logger = log.get(__name__)


def save(
    path: Path, engines: Mapping[str, TrainEngine], extra: dict[str, object], world: World
) -> None:
    """Write a checkpoint; `path` appears once all ranks have written all of it.

    Args:
        engines: by folder inside `path`.
        extra: what `load` returns; the manifest names its `step`.
    """
    if world.is_rank0:
        checkpoint.begin(path)
    world.barrier()
    for folder, engine in engines.items():
        engine.save(checkpoint.temporary(path) / folder, extra)
    world.barrier()
    if world.is_rank0:
        facts: dict[str, object] = {"step": extra.get("step", 0), "world_size": world.size}
        checkpoint.commit(path, facts | checkpoint.versions())
        logger.info("checkpoint written", path=str(path))
    world.barrier()


def load(path: Path, engines: Mapping[str, TrainEngine]) -> dict[str, Any]:
    """Read a checkpoint into `engines`, at any number of ranks; return its `extra`.

    Raises:
        UserError: the checkpoint is missing or broken, or of other models or another optimizer.
    """
    checkpoint.require(path)
    for folder in engines:
        if not (path / folder).is_dir():
            fix = "another trial_name, or resume=never to start over."
            what = f"checkpoint {path} has no {folder}"
            raise UserError(f"{what}. Use the advantage.type that the run was started with, {fix}")
    found = [engine.load(path / folder) for folder, engine in engines.items()]
    return found[0]


def find(config: ExperimentConfig) -> Path | None:
    """Return the newest good checkpoint; None if there is none.

    Raises:
        UserError: `resume` names another checkpoint; a rank cannot go back to it.
    """
    folder, wanted = run_paths(config).checkpoints, config.resume
    newest = checkpoint.latest(folder)
    name = newest.name if newest else "none"
    fits = {"auto": True, "must": newest is not None, "never": newest is None}
    if not fits.get(wanted, wanted == name):
        what = f"resume={wanted}, but the newest good checkpoint in {folder} is {name}"
        fix = "Use resume=auto; or run train.py once without RANK to go back or to start over."
        raise UserError(f"{what}. {fix}")
    return newest
