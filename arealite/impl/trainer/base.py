"""The base class of trainers: components, checkpoints, metric loggers, and stop requests."""

import os
import signal
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

from arealite.api.engine import TrainEngine
from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.api.trainer import Trainer
from arealite.base import log
from arealite.base.errors import UserError
from arealite.base.signals import is_repeated_hangup, stop_signals
from arealite.impl.engine import checkpoint
from arealite.impl.trainer.components import Components, LoadEngines, build_components
from arealite.impl.trainer.metrics import Metrics, Stopwatch
from arealite.impl.trainer.rank_group import World

logger = log.get(__name__)
ByFolder = Mapping[str, TrainEngine]
"""Engines by the folder of a checkpoint that has their state."""


class BaseTrainer(Trainer):
    """One rank of a trainer; a subclass adds the loop."""

    checkpoint_keep: int
    """Number of checkpoints that are kept."""

    def __init__(
        self, config: ExperimentConfig, components: Components | None, load_engines: LoadEngines
    ) -> None:
        """Initialize the rank.

        Args:
            components: None: `build_components` builds them.
            load_engines: see `build_components`.
        """
        self.config = config
        self.paths = run_paths(config)
        self.stop = StopRequest()
        self.read_data()
        self.components = components or build_components(config, load_engines)
        self.world = self.components.world
        self.engine = self.components.engine
        self.clock = Stopwatch()
        self.saved_step: int | None = None
        """Step of the newest checkpoint of this process."""
        self._resources = ExitStack()
        self.close_at_end(self.stop.restore)
        self.close_at_end(self.world.destroy)
        for metric_logger in self.components.loggers:
            self.close_at_end(metric_logger.close)
        publisher = self.components.publisher
        if publisher is not None:
            self.close_at_end(publisher.close)

    def read_data(self) -> None:
        """Read data that loading the engines depends on; no-op in the base class."""

    @property
    @abstractmethod
    def progress(self) -> dict[str, object]:
        """State that a checkpoint holds beside the models and the step."""

    @property
    def engines(self) -> dict[str, TrainEngine]:
        """The trained engines, by their folder in a checkpoint."""
        engines = {".": self.engine}
        if self.components.critic is not None:
            engines["critic"] = self.components.critic
        return engines

    # ------------------------------------------------------------ checkpoints

    def load_checkpoint(self) -> tuple[int, dict[str, Any]]:
        """Load the newest checkpoint, if there is one.

        Returns:
            (the step to train next, `progress` of the checkpoint; (0, {}) without a checkpoint).

        Raises:
            UserError: `resume` contradicts the checkpoints, or the checkpoint is of other models.
        """
        folder = self.paths.checkpoints
        wanted = self.config.resume
        step = 0
        extra = dict[str, Any]()
        newest = checkpoint.latest(folder)
        name = newest.name if newest else "none"
        fits = {
            "auto": True,
            "must": newest is not None,
            "never": newest is None,
        }
        if not fits.get(wanted, wanted == name):
            raise UserError(
                f"resume={wanted}, but the newest good checkpoint in {folder} is {name}. "
                "Use resume=auto; or run train.py once without RANK to go back or to start over."
            )
        if newest is not None:
            extra = read_engines(newest, self.engines)
            step = int(extra["step"])
            self.saved_step = step
        logger.info("training starts", step=step, checkpoint=str(newest or "none"))
        return step, extra

    def checkpoint(self, step: int) -> None:
        """Write the checkpoint after `step` steps, and remove old checkpoints."""
        path = self.paths.checkpoints / f"step-{step:06d}"
        with self.clock("time/checkpoint_s"):
            extra = {"step": step} | self.progress
            write_engines(path, self.engines, extra, self.world)
            self.saved_step = step
            if self.world.is_rank0:
                self.on_checkpoint(step, path)
                checkpoint.prune(self.paths.checkpoints, self.checkpoint_keep)

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Run on rank 0 when a checkpoint is durable, before old checkpoints are removed."""

    # ------------------------------------------------------------ metrics and end

    def write_metrics(self, step: int, metrics: Metrics) -> None:
        """Write one line to every metric logger; only rank 0 has loggers."""
        for metric_logger in self.components.loggers:
            metric_logger.log(step, metrics)

    def rewind_metrics(self, step: int) -> None:
        """Remove the metrics of steps after `step`, which are trained again."""
        for metric_logger in self.components.loggers:
            metric_logger.rewind(step)

    def close_at_end(self, close: Callable[[], None]) -> None:
        """Call `close` at the end of training, in reverse order of these calls.

        A failure of `close` is logged, so that the other calls run and the loop's error is raised.
        """
        self._resources.callback(_close, close)

    def close(self) -> None:
        """Release threads, links, files, the process group and signal handlers."""
        self._resources.close()


def _close(close: Callable[[], None]) -> None:
    try:
        close()
    except Exception as error:  # noqa: BLE001  (see close_at_end)
        logger.error("not closed", part=close.__qualname__, error=repr(error))


def write_engines(
    path: Path,
    engines: ByFolder,
    extra: dict[str, object],
    world: World,
) -> None:
    """Write a checkpoint; `path` appears once all ranks have written all of it.

    Args:
        path: the checkpoint's folder.
        engines: by folder inside `path`.
        extra: what `read_engines` returns; the manifest names its `step`.
        world: the ranks.
    """
    if world.is_rank0:
        checkpoint.begin(path)
    world.barrier()
    for folder, engine in engines.items():
        engine.save(checkpoint.temporary(path) / folder, extra)
    world.barrier()
    if world.is_rank0:
        manifest: dict[str, object] = {
            "step": extra.get("step", 0),
            "world_size": world.size,
            **checkpoint.versions(),
        }
        checkpoint.commit(path, manifest)
        logger.info("checkpoint written", path=str(path))
    world.barrier()


def read_engines(path: Path, engines: ByFolder) -> dict[str, Any]:
    """Read a checkpoint into `engines`, at any number of ranks; return its `extra`.

    Raises:
        UserError: the checkpoint is missing or broken, or of other models or another optimizer.
    """
    checkpoint.require(path)
    for folder in engines:
        if not (path / folder).is_dir():
            raise UserError(
                f"checkpoint {path} has no {folder}. "
                "Use the advantage.type that the run was started with, "
                "another trial_name, or resume=never to start over."
            )
    extras = [engine.load(path / folder) for folder, engine in engines.items()]
    return extras[0]


class StopRequest:
    """The first stop signal sets `requested`; the second one ends the process at once."""

    def __init__(self) -> None:
        self.requested = False
        self._earlier_handlers = {
            number: signal.signal(number, self._on_signal) for number in stop_signals()
        }

    def restore(self) -> None:
        """Restore the handlers that were set before."""
        for number, handler in self._earlier_handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # No locks and no logging here: the interrupted code may hold the lock.
        if is_repeated_hangup(number, int(self.requested)):
            return
        if self.requested:
            os._exit(128 + number)
        self.requested = True
