"""Makes the parts a trainer drives, from the config, in the one order that works.

Apart from the loop, so that the loop names no implementation and tests hand it others.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from arealite.api.config import ExperimentConfig, run_paths
from arealite.api.engine import Head, TrainEngine, Training, engines
from arealite.api.engine_config import TrainEngineConfig
from arealite.api.logger import MetricLogger, loggers
from arealite.api.publisher import WeightPublisher, publishers
from arealite.base import log
from arealite.base.errors import UserError
from arealite.base.names import RunPaths
from arealite.base.signals import STOP
from arealite.impl.engine import checkpoint
from arealite.impl.logger.guarded import GuardedLogger
from arealite.impl.trainer.world import World
from arealite.system.links.trainer_link import TrainerLink
from arealite.system.names.registry import NameRegistry

logger = log.get(__name__)


@dataclass
class Parts:
    """What a trainer is wired from."""

    world: World
    engine: TrainEngine
    connect: Callable[[], TrainerLink]
    """Opens a link to the datapipe; a link belongs to the thread that uses it."""
    publisher: WeightPublisher | None = None
    """None except on rank 0 of a trainer with servers."""
    loggers: list[MetricLogger] = field(default_factory=list)
    """[] except on rank 0."""
    reference: TrainEngine | None = None
    """Frozen; None where nothing is compared with it."""
    critic: TrainEngine | None = None
    """None where no advantage needs it."""


def assemble(config: ExperimentConfig, load: Callable[[ExperimentConfig], dict[str, Any]]) -> Parts:
    """Join the other ranks, `load` the engines, and open what rank 0 alone has."""
    world = World.join(threads=config.launcher.trainer_threads, seed=config.seed)
    registry = NameRegistry.of(config)
    made = Parts(
        world=world,
        **load(config),
        connect=lambda: TrainerLink(
            lambda: registry.address("datapipe"),
            rank=world.rank,
            world_size=world.size,
            secret=registry.secret,
        ),
    )
    if world.lead:
        if not config.trainer.is_offline:
            publisher = publishers.get(config.trainer.ppo.publisher.type)
            made.publisher = publisher(config, made.engine)
        made.loggers = open_loggers(config)
    return made


def open_loggers(config: ExperimentConfig) -> list[MetricLogger]:
    """Open what rank 0 writes metrics to; of a failure of others than metrics.jsonl the trainer
    hears nothing.

    That file is the run's own record: the launcher reads from it how far the run is.
    """
    root, names = run_paths(config).root, dict.fromkeys(config.logger.types)
    names.pop("jsonl", None)
    others = [GuardedLogger(root, loggers.get(name)) for name in names]
    return [loggers.get("jsonl")(root), *others]


def make_engines(config: ExperimentConfig) -> dict[str, Any]:
    """Load the models that PPO needs, as Parts name them: this rank's shard of each."""
    ppo, kl, critic = config.trainer.ppo, config.trainer.ppo.kl, config.trainer.ppo.critic
    updates = ppo.total_steps * ppo.updates * ppo.epochs
    made = {"engine": make_engine(config, training=Training(ppo.optimizer, ppo.lr, updates))}
    if kl.coef > 0:
        path = kl.reference if kl.reference != "initial" else None
        made["reference"] = make_reference(config, made["engine"], path)
    if ppo.advantage.type == "gae":
        training = Training(critic.optimizer, critic.lr, updates)
        made["critic"] = make_engine(config, critic.path, training=training, head="value")
    return made


def make_reference(config: ExperimentConfig, engine: Any, path: str | None) -> TrainEngine:
    """Return the frozen model at `path`, of None the one that `engine` began with: its own, without
    the adapters, where it trains nothing else."""
    if path is None and _options(config).fsdp.lora.rank:
        return engine.without_adapter()
    return make_engine(config, path)


def _options(config: ExperimentConfig) -> TrainEngineConfig:
    trainer = config.trainer
    return trainer.offline.engine if trainer.is_offline else trainer.ppo.engine


def make_engine(
    config: ExperimentConfig,
    path: str | None = None,
    *,
    training: Training | None = None,
    head: Head = "lm",
) -> TrainEngine:
    """Load the model at `path`, of None that at model.path; without `training` it is frozen."""
    options = _options(config)
    engine: Any = engines.get(options.type)
    return engine(
        getattr(options, options.type, options.fsdp),
        model_path=path or config.model.path,
        seed=config.seed,
        training=training,
        head=head,
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


def let_go_of(held: Iterable[Callable[[], None]]) -> None:
    """Call each in order, whatever state it is in; a failure here hides no earlier error."""
    for let_go in held:
        try:
            let_go()
        except Exception as error:  # noqa: BLE001  (the others must be let go of, too)
            logger.error("not closed", part=let_go.__qualname__, error=repr(error))


def critic_of(config: ExperimentConfig, path: Path) -> Path:
    """Return the critic's part of the checkpoint at `path`.

    Raises:
        UserError: it has none.
    """
    part = run_paths(config).critic / path.name
    if checkpoint.manifest(part) is None:
        raise UserError(
            f"checkpoint {path} has no critic (looked in {part.parent}). Use the advantage.type "
            "that the run was begun with, another trial_name, or resume=never to begin anew."
        )
    return part


def prune(paths: RunPaths, keep: int) -> None:
    """Remove all checkpoints but the `keep` newest, with what of the critic belongs to none."""
    checkpoint.prune(paths.checkpoints, keep)
    kept = {path.name for path in checkpoint.list_good(paths.checkpoints)}
    for path in paths.critic.glob("*"):
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)


class StopRequest:
    """Makes the first SIGTERM or SIGINT a wish that the loop reads; the second ends the process."""

    def __init__(self) -> None:
        self.asked = False
        wanted = (STOP, signal.SIGINT)
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
