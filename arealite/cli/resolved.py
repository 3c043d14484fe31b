"""Read the resolved config that a command wrote, with the parts that the config names.

A role starts here: it reads one file, and neither YAML nor OmegaConf.
"""

import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from arealite.api.agent import agents
from arealite.api.algorithm import advantages, objectives
from arealite.api.collector_config import AgentConfig
from arealite.api.engine import engines
from arealite.api.env import EnvConfig, envs
from arealite.api.experiment_config import ExperimentConfig, ServerConfig
from arealite.api.launcher import launchers
from arealite.api.llm import clients
from arealite.api.llm_server import servers
from arealite.api.logger import loggers
from arealite.api.publisher import publishers
from arealite.api.reward import RewardConfig, rewards
from arealite.api.runtime import runtimes
from arealite.api.tool import tools
from arealite.api.trainer import trainers
from arealite.base import config_tree
from arealite.base.config_tree import PartConfigs, field_names, values
from arealite.base.errors import UserError
from arealite.base.proxies import bypass_proxies
from arealite.base.registry import Registry, import_plugins
from arealite.impl.launcher.processes import own_address

C = TypeVar("C")
Root = TypeVar("Root", bound=ExperimentConfig | ServerConfig)

TABLES: dict[str, Registry[Any]] = {
    table.kind: table
    for table in (
        trainers,
        engines,
        agents,
        envs,
        rewards,
        clients,
        servers,
        publishers,
        tools,
        launchers,
        loggers,
        objectives,
        advantages,
        runtimes,
    )
}
"""The registry of each kind of part. Options name their kind (api.fields.named)."""
DERIVED: dict[type, Registry[Any]] = {
    AgentConfig: agents,
    EnvConfig: envs,
    RewardConfig: rewards,
}
"""The registries whose parts have a config with the options of the part that they extend."""


def load(schema: type[C], file: Path, *, has_all_parts: bool = True) -> C:
    """Import the parts of a resolved config, and return the config.

    Args:
        schema: The root config class.
        file: The file that a command wrote for this process.
        has_all_parts: False: the command may have had parts that this process cannot import, such
            as those of a notebook's cells; their options are ignored.

    Raises:
        UserError: The file is missing or of another version, or a module cannot be imported.
    """
    tree = config_tree.read(file)
    parts = import_parts(tree.get("imports", []), words_of(tree))
    config = config_tree.build(config_tree.extended(schema, parts), tree)
    known_options = config_tree.plain(config)
    unknown_keys = dict(values("", tree)).keys() - dict(values("", known_options))
    if has_all_parts and unknown_keys:
        raise UserError(
            f"{file}: unknown key '{min(unknown_keys)}'. "
            "Another version of AReaLite wrote it: start its command again."
        )
    return config


def import_parts(modules: Sequence[str], words: Collection[str]) -> PartConfigs:
    """Import plugins, `modules`, and the installed parts that have one of the names `words`.

    Returns:
        The config classes of all parts that are not AReaLite's.
    """
    folder = str(Path.cwd())
    if "" not in sys.path and folder not in sys.path:
        sys.path.insert(0, folder)
    import_plugins(modules)
    for table in TABLES.values():
        table.enter(words)
    return {kind: table.configs for kind, table in TABLES.items()}


def check_derived() -> None:
    """Check that each registered config has all options that its built-in base part reads.

    Raises:
        UserError: A config lacks an option.
    """
    for schema, table in DERIVED.items():
        for name, part_config in table.configs.items():
            _check_options_of_base(schema, name, part_config)


def _check_options_of_base(schema: type, name: str, part_config: type) -> None:
    """Check that the config of part `name` has the options that its base part reads."""
    table = DERIVED[schema]
    base = table.base_of(name)
    base_options = getattr(schema(), base, None)
    missing = {*field_names(base_options)} - {*field_names(part_config)}
    if missing:
        raise UserError(
            f"{table.kind} '{name}': its config {part_config.__name__} has no option "
            f"'{min(missing)}', which {base} reads. Derive it from {type(base_options).__name__}."
        )


def words_of(options: object) -> set[str]:
    """Return every key and text in plain options: a part's name is one of them."""
    if isinstance(options, str):
        return {options}
    if isinstance(options, dict):
        tree = cast(dict[object, object], options)
        names = {str(name) for name in tree}
        return names.union(*map(words_of, tree.values()))
    if isinstance(options, Sequence):
        return set[str]().union(*map(words_of, cast(Sequence[object], options)))
    return set()


def resolve_host(config: Root) -> Root:
    """Replace `cluster.host=auto` by the address of this host, which clients reach directly."""
    if config.cluster.host == "auto":
        config = replace(config, cluster=replace(config.cluster, host=own_address()))
    bypass_proxies(config.cluster.host)
    return config
