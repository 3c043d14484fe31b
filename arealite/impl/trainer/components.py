"""Builds the components of a trainer from the config: ranks, engines, links, publisher, loggers.

The loop names no implementation, so tests can pass other components.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NotRequired, TypedDict

from arealite.api.engine import Head, TrainEngine, Training, engines
from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.api.hooks import AfterFirstPublish, LoggerOpener
from arealite.api.logger import MetricLogger, loggers
from arealite.api.publisher import WeightPublisher, publishers
from arealite.base import entries
from arealite.impl.trainer.rank_group import World
from arealite.system.links.trainer_link import TrainerLink
from arealite.system.names.name_registry import NameRegistry


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
    if world.is_rank0:
        if not is_offline:
            publisher_class = publishers.get(config.trainer.ppo.publisher.type)
            components.publisher = publisher_class(config, components.engine)
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
