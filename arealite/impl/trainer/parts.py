"""Makes the parts a trainer drives, from the config, in the one order that works.

Apart from the loop, so that the loop names no implementation and tests hand it others.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from arealite.api.config import ExperimentConfig, run_paths
from arealite.api.engine import TrainEngine, Training, engines
from arealite.api.logger import MetricLogger, loggers
from arealite.api.publisher import WeightPublisher, publishers
from arealite.base import log
from arealite.base.errors import UserError
from arealite.impl.engine import checkpoint
from arealite.impl.trainer.world import World
from arealite.system.name_registry import NameRegistry
from arealite.system.trainer_link import TrainerLink

logger = log.get(__name__)


@dataclass
class Parts:
    """What a trainer is wired from."""

    world: World
    engine: TrainEngine
    connect: Callable[[], TrainerLink]
    """Opens a link to the datapipe; a link belongs to the thread that uses it."""
    publisher: WeightPublisher | None = None
    """None except on rank 0."""
    loggers: list[MetricLogger] = field(default_factory=list)
    """[] except on rank 0."""


def assemble(config: ExperimentConfig) -> Parts:
    """Join the other ranks, load the model, and open what rank 0 alone has."""
    ppo, paths = config.trainer.ppo, run_paths(config)
    world = World.join(threads=config.launcher.local.trainer_threads, seed=config.seed)
    registry = NameRegistry.of(config)
    publisher: Any = publishers.get(ppo.publisher.type)
    made = Parts(
        world=world,
        engine=make_engine(config),
        connect=lambda: TrainerLink(
            lambda: registry.address("datapipe"), rank=world.rank, world_size=world.size
        ),
    )
    if world.lead:
        made.publisher = publisher(
            ppo.publisher,
            registry=registry,
            fallback_dir=paths.root / "weights",
            model_path=Path(config.model.path).expanduser(),
            host=config.cluster.host,
        )
        names = dict.fromkeys(["jsonl", *config.logger.types])
        made.loggers = [loggers.get(name)(paths.root) for name in names]
    return made


def make_engine(config: ExperimentConfig) -> TrainEngine:
    """Load the initial model and its fresh optimizer, as this rank's shard."""
    ppo = config.trainer.ppo
    engine: Any = engines.get(ppo.engine.type)
    return engine(
        getattr(ppo.engine, ppo.engine.type, ppo.engine.fsdp),
        model_path=config.model.path,
        seed=config.seed,
        training=Training(ppo.optimizer, ppo.lr, ppo.total_steps * ppo.updates * ppo.epochs),
    )


def find_checkpoint(config: ExperimentConfig) -> Path | None:
    """Return the checkpoint to go on from: the newest good one, None before there is one.

    Raises:
        UserError: `resume` wants another; only the train.py that starts the ranks can give it.
    """
    folder, wanted = run_paths(config).checkpoints, config.resume
    newest = checkpoint.latest(folder)
    name = newest.name if newest else "none"
    fits = {"auto": True, "must": newest is not None, "never": newest is None}
    if not fits.get(wanted, wanted == name):
        raise UserError(
            f"resume={wanted}, but the newest good checkpoint in {folder} is {name}. Use "
            "resume=auto; or start once without RANK, which can go back or begin anew."
        )
    return newest


class StopRequest:
    """Makes the first SIGTERM or SIGINT a wish that the loop reads; the second ends the process."""

    def __init__(self) -> None:
        self.asked = False
        wanted = (signal.SIGTERM, signal.SIGINT)
        self._before = {number: signal.signal(number, self._on_signal) for number in wanted}

    def restore(self) -> None:
        """Put back the handlers that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # No locks here, logging included: the loop may have been cut while holding one.
        if self.asked:
            os._exit(128 + number)
        self.asked = True
