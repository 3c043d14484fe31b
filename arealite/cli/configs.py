"""Loads the root configs, with the parts that `imports` and installed packages add.

The one place that knows which config class belongs to which table.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from arealite.api.agent import AgentConfig, agents
from arealite.api.config import ExperimentConfig, LoggerConfig, ServerConfig, run_paths
from arealite.api.engine import engines
from arealite.api.engine_config import TrainEngineConfig
from arealite.api.env import envs
from arealite.api.env_config import EnvConfig
from arealite.api.launcher import LauncherConfig, launchers
from arealite.api.llm import LLMClientConfig, clients
from arealite.api.llm_server import LLMServerConfig, servers
from arealite.api.logger import loggers
from arealite.api.publisher import publishers
from arealite.api.publisher_config import PublisherConfig
from arealite.api.reward import RewardConfig, rewards
from arealite.api.tool import ToolsEnvConfig, tools
from arealite.api.trainer import TrainerConfig, trainers
from arealite.base import config as base_config
from arealite.base.errors import UserError
from arealite.base.registry import Registry, import_plugins
from arealite.cli import options
from arealite.impl.launcher.processes import own_address

C = TypeVar("C")
Root = TypeVar("Root", bound=ExperimentConfig | ServerConfig)

CONFIG_DIR = Path(__file__).resolve().parents[1] / "config"
"""The YAML files, in a checkout (through a link) and in an installed wheel."""
TABLES: dict[type, Registry[Any]] = {
    TrainerConfig: trainers,
    TrainEngineConfig: engines,
    AgentConfig: agents,
    EnvConfig: envs,
    RewardConfig: rewards,
    LLMClientConfig: clients,
    LLMServerConfig: servers,
    PublisherConfig: publishers,
    ToolsEnvConfig: tools,
    LauncherConfig: launchers,
    LoggerConfig: loggers,
}
"""Each part's config class, with its table."""
NAMED_IN = {ToolsEnvConfig: "tools", LoggerConfig: "types"}
"""Options that list names of a table; other config classes of TABLES have one name, in `type`."""


def load(
    schema: type[C],
    files: Path | Sequence[Path],
    overrides: Sequence[str],
    *,
    is_saved: bool = False,
) -> C:
    """Import plugins, then load the files and the overrides, later ones winning, as `schema`.

    Args:
        is_saved: see base.config.load.

    Raises:
        UserError: see base.config.load; or a plugin cannot be imported.
    """
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    files = [files] if isinstance(files, Path) else files
    import_plugins(_imports(files, overrides))
    check_derived()
    return base_config.load(schema, files, overrides, parts(), is_saved=is_saved)


def parse(schema: type[C], argv: Sequence[str], *, command: str, about: str) -> C:
    """Return the config that a command line asks for."""
    default = CONFIG_DIR / ("llm_server.yaml" if schema is ServerConfig else "async_ppo.yaml")
    layers = options.parse(argv, command=command, about=about, schema=schema, default=default)
    return load(schema, layers.files, layers.overrides)


def check_derived() -> None:
    """Check that each registered config has all options that its built-in base part reads.

    Raises:
        UserError: a config lacks an option.
    """
    for schema in (AgentConfig, EnvConfig, RewardConfig):
        for name, own in TABLES[schema].configs.items():
            base = TABLES[schema].base_of(name)
            read = getattr(schema(), base, None)
            if lacking := {*_fields(read)} - {*_fields(own)}:
                raise UserError(
                    f"{TABLES[schema].kind} '{name}': its config {own.__name__} has no option "
                    f"'{min(lacking)}', which {base} reads. Derive it from {type(read).__name__}."
                )


def check_names(config: Any) -> None:
    """Check that every part that a config tree names is in its table.

    Raises:
        UserError: an unknown name.
    """
    for _, node in base_config.nodes(config):
        for schema, table in TABLES.items():
            if isinstance(node, schema):
                found = getattr(node, NAMED_IN.get(schema, "type"))
                for name in found if schema in NAMED_IN else [found]:
                    table.check(name)


def at_home(config: Root) -> Root:
    """Return the config of a process on this host: `cluster.host=auto` is its own address."""
    if config.cluster.host != "auto":
        return config
    return replace(config, cluster=replace(config.cluster, host=own_address()))


def load_stages(stages: Sequence[options.Layers]) -> list[ExperimentConfig]:
    """Load the configs of stages that follow each other; see options.THEN for what they share.

    Raises:
        UserError: see load; or a stage exports no model, and the next has no model.path of its own.
    """
    made = list[ExperimentConfig]()
    for number, own in enumerate(stages, start=1):
        shared = stages[0].overrides if number > 1 else []
        config = load(ExperimentConfig, own.files, [*shared, *own.overrides])
        policies = [earlier for earlier in made if earlier.trainer.type != "reward"]
        named = [layer.model.path for layer in _layers(own) if "path" in layer.get("model", {})]
        if policies and not named:
            named = [str(run_paths(policies[-1]).export)]
            trainer = policies[-1].trainer
            if not trainer.is_offline and not trainer.ppo.checkpoint.export:
                raise UserError(
                    f"stage {number} has no model: trainer.ppo.checkpoint.export is false in the "
                    "stage before. Set it there, or model.path after --then."
                )
        if named:
            config = replace(config, model=replace(config.model, path=named[0]))
        if number < len(stages):
            config = replace(config, trial_name=f"{config.trial_name}-stage{number}")
        made.append(config)
    return made


def parts() -> base_config.Parts:
    """Return each part's config class with the configs registered from outside."""
    return {config: table.configs for config, table in TABLES.items()}


def _fields(config: Any) -> Sequence[str]:
    return [*getattr(config, "__dataclass_fields__", ())]


def _layers(layers: options.Layers) -> list[Any]:
    """Read files and overrides as they are, the strongest first."""
    files = [base_config.read(file) for file in reversed(layers.files)]
    return [base_config.dotlist(layers.overrides), *files]


def _imports(files: Sequence[Path], overrides: Sequence[str]) -> list[str]:
    """Find `imports` before the schema can be known: it decides the schema."""
    for layer in _layers(options.Layers([*files], [*overrides])):
        if layer.get("imports") is not None:
            return [str(name) for name in layer.imports]
    return []
