"""The base class of trainers: components, checkpoints, metric loggers, and stop requests.

The components are built from the config: ranks, engines, links, publisher, loggers. The loop names
no implementation, so tests can pass other components.
"""

import os
import signal
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NotRequired, TypedDict

from arealite.api.engine import Head, TrainedWeights, TrainEngine, Training, engines
from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.api.hooks import AfterFirstPublish, LoggerOpener
from arealite.api.logger import MetricLogger, loggers
from arealite.api.publisher import PolicyProof, WeightPublisher, publishers
from arealite.api.trainer import Trainer
from arealite.base import entries, log
from arealite.base.errors import UserError
from arealite.base.signals import is_repeated_hangup, stop_signals
from arealite.impl.engine import checkpoint
from arealite.impl.trainer.metrics import Metrics, Stopwatch
from arealite.impl.trainer.rank_group import World
from arealite.system.links.trainer_link import TrainerLink
from arealite.system.names.name_registry import NameRegistry

logger = log.get(__name__)


@dataclass(kw_only=True)
class Components:
    """The components of a trainer."""

    world: World
    engine: TrainEngine
    connect: Callable[[], TrainerLink]
    """Opens a link to the datapipe; only one thread may use a link."""
    publisher: WeightPublisher | None = None
    """None except on rank 0 of a trainer with servers."""
    loggers: list[MetricLogger] = field(default_factory=list)
    """[] except on rank 0."""
    reference: TrainEngine | None = None
    """Frozen; None if the algorithm uses no reference."""
    critic: TrainEngine | None = None
    """None if the advantages need no critic."""
    after_first_publish: Sequence[AfterFirstPublish] = ()
    """Checks of the run, which need servers with the trainer's weights."""
    proof: PolicyProof | None = None
    """Proves the weights of servers; None without servers."""


class Engines(TypedDict):
    """The engines of a trainer, by their names in Components."""

    engine: TrainEngine
    reference: NotRequired[TrainEngine]
    critic: NotRequired[TrainEngine]


LoadEngines = Callable[[ExperimentConfig], Engines]


def build_components(config: ExperimentConfig, load_engines: LoadEngines) -> Components:
    """Join the other ranks, load the engines, and open publisher and loggers on rank 0."""
    world = World.init(threads=config.launcher.trainer_threads, seed=config.seed)
    registry = NameRegistry.of(config)
    is_offline = config.trainer.is_offline

    def connect() -> TrainerLink:
        resolve = partial(registry.address, "datapipe")
        return TrainerLink(
            resolve=resolve, rank=world.rank, world_size=world.size, secret=registry.secret
        )

    components = Components(
        world=world,
        **load_engines(config),
        connect=connect,
        after_first_publish=[] if is_offline else entries.hooks("after_first_publish"),
    )
    if not is_offline:
        makers = entries.hooks("policy_proof")
        components.proof = entries.first_result(makers, config, components.engine, world)
    if world.is_rank0:
        if not is_offline:
            publisher_class = publishers.get(config.trainer.ppo.publisher.type)
            components.publisher = publisher_class(config, components.engine)
            components.publisher.proof = components.proof
        components.loggers = open_loggers(config)
    return components


def open_loggers(config: ExperimentConfig) -> list[MetricLogger]:
    """Open the metric loggers of rank 0: metrics.jsonl, and those of the config.

    metrics.jsonl is the run's own record, from which the launcher reads the progress: a failure to
    write it ends the trainer. A failure of any other logger does not reach the trainer.
    """
    root = run_paths(config).root
    names = dict.fromkeys(config.logger.types)
    names.pop("jsonl", None)
    openers: list[LoggerOpener] = entries.hooks("logger_opener")
    others: list[MetricLogger] = []
    for name in names:
        kind = loggers.get(name)
        others.append(entries.first_result(openers, root, kind) or kind(root))
    return [loggers.get("jsonl")(root), *others]


def load_ppo_engines(config: ExperimentConfig) -> Engines:
    """Load this rank's shards of the models that PPO needs."""
    ppo = config.trainer.ppo
    num_updates = ppo.total_steps * ppo.updates * ppo.epochs
    policy_training = Training(optimizer=ppo.optimizer, lr=ppo.lr, total_updates=num_updates)
    engine_by_name = Engines(engine=make_engine(config, training=policy_training))
    if ppo.kl.coef > 0:
        path = ppo.kl.reference if ppo.kl.reference != "initial" else None
        policy = engine_by_name["engine"]
        engine_by_name["reference"] = make_reference(config, policy, path)
    if ppo.advantage.has_critic:
        critic_training = Training(
            optimizer=ppo.critic.optimizer, lr=ppo.critic.lr, total_updates=num_updates
        )
        engine_by_name["critic"] = make_engine(
            config,
            ppo.critic.path,
            training=critic_training,
            head="value",
        )
    return engine_by_name


def make_reference(
    config: ExperimentConfig,
    engine: TrainEngine,
    path: str | None,
) -> TrainEngine:
    """Return a frozen engine with the model at `path`; None: the model that `engine` began with.

    Where `engine` trains adapters only, that is the same engine without its adapters.
    """
    trains_adapters = config.trainer.selected_options.engine.fsdp.lora.rank or config.model.adapter
    if path is None and trains_adapters:
        return engine.without_adapter()
    return make_engine(config, path)


def make_engine(
    config: ExperimentConfig,
    path: str | None = None,
    *,
    training: Training | None = None,
    head: Head = "lm",
) -> TrainEngine:
    """Load the model at `path` (None: at model.path); without `training` it is frozen."""
    engine_config = config.trainer.selected_options.engine
    engine_class = engines.get(engine_config.type)
    options = getattr(engine_config, engine_config.type, engine_config.fsdp)
    adapter_option = dict[str, Any]()
    if config.model.adapter and training and head == "lm":
        adapter_option["adapter"] = config.model.adapter
    return engine_class(
        options,
        model_path=path or config.model.path,
        seed=config.seed,
        training=training,
        head=head,
        **adapter_option,
    )


def stage_weights(
    engine: TrainEngine,
    publisher: WeightPublisher | None,
    proof: PolicyProof | None,
    world: World,
    version: int,
) -> None:
    """Stream the weights to the publisher, on all ranks; repeat while it needs them.

    Where adapters are trained, and all servers can load them alone, no other weights are sent.

    Args:
        engine: The policy.
        publisher: None except on rank 0.
        proof: See Components.
        world: The ranks.
        version: The version of the weights.
    """
    if proof is not None:
        proof.expect(version)
    on_device = publisher is not None and publisher.takes_device_tensors
    is_needed = True
    while is_needed:
        is_adapter = world.any(publisher is not None and publisher.takes_adapter)
        if is_adapter:
            weights = engine.stream_adapter()
        else:
            weights = engine.stream_weights(on_device=on_device)
        if proof is not None:
            weights = proof.fingerprinted(weights)
        if publisher is None:
            deque(weights, maxlen=0)  # other ranks only take part in gathering
            is_needed_here = False
        elif is_adapter:
            is_needed_here = publisher.stage_adapter(version, weights)
        else:
            is_needed_here = publisher.stage(version, weights)
        is_needed = world.any(is_needed_here)


ByFolder = Mapping[str, TrainedWeights]
"""Engines or adapters by the folder of a checkpoint that has their state."""


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
