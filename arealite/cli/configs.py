"""Load the root configs, with the parts that `imports` and installed packages register."""

import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from arealite.api.agent import AgentConfig, agents
from arealite.api.engine import engines
from arealite.api.engine_config import FSDPConfig
from arealite.api.env import envs
from arealite.api.env_config import EnvConfig
from arealite.api.experiment_config import (
    ExperimentConfig,
    ServedModelConfig,
    ServerConfig,
    name_dir,
)
from arealite.api.formulas import advantages, objectives
from arealite.api.hooks import ModelFormat, StageParser
from arealite.api.launcher import launchers
from arealite.api.llm import clients
from arealite.api.llm_server import servers
from arealite.api.logger import loggers
from arealite.api.publisher import publishers
from arealite.api.reward import RewardConfig, rewards
from arealite.api.runtime import runtimes
from arealite.api.tool import tools
from arealite.api.trainer import trainers
from arealite.base import config as base_config
from arealite.base import entries
from arealite.base.errors import UserError
from arealite.base.proxies import bypass_proxies
from arealite.base.registry import Registry, import_plugins
from arealite.cli import options
from arealite.cli.presets import CONFIG_DIR
from arealite.impl.launcher.processes import own_address, server_overrides

Files = Path | Sequence[Path]
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


def load(schema: type[C], files: Files, overrides: Sequence[str], *, is_saved: bool = False) -> C:
    """Import plugins, then load files and overrides as `schema`.

    Args:
        schema: The root config class.
        files: YAML files; later ones win.
        overrides: Items like "a.b=1"; they win over files.
        is_saved: See base.config.load.

    Raises:
        UserError: See base.config.load; or a plugin cannot be imported.
    """
    files = [files] if isinstance(files, Path) else files
    sources = options.Layers(files=[*files], overrides=[*overrides])
    overrides_layer, *file_layers = read_layers(sources)
    layers = [overrides_layer, *file_layers]
    parts = _import_parts(_imports(layers), _words(layers))
    return base_config.load(
        schema,
        files,
        overrides,
        parts,
        is_saved=is_saved,
        read_files=file_layers[::-1],
    )


def load_run(file: Path) -> ExperimentConfig:
    """Load the config that the supervisor of a run saved for its roles.

    Raises:
        UserError: See load.
    """
    saved = base_config.read_saved(file)
    parts = _import_parts(saved.get("imports") or [], _words(saved))
    changed = base_config.without_defaults(saved, asdict(ExperimentConfig()))
    read_file = base_config.DictConfig(changed)
    return base_config.load(ExperimentConfig, [file], [], parts, read_files=[read_file])


def _import_parts(modules: Sequence[str], words: Collection[str]) -> base_config.PartConfigs:
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
    check_derived()
    return {kind: table.configs for kind, table in TABLES.items()}


def parse(schema: type[Root], argv: Sequence[str], *, command: str, description: str) -> Root:
    """Parse a command line; return its config."""
    default_name = "llm_server.yaml" if schema is ServerConfig else "async_ppo.yaml"
    line = options.CommandLine(
        command=command,
        description=description,
        schema=schema,
        default=CONFIG_DIR / default_name,
    )
    layers = line.parse(argv)
    return with_model(load(schema, layers.files, layers.overrides))


def with_model(config: Root) -> Root:
    """Return a config whose `model.path` is a folder, and whose dtypes are not `auto`.

    A hub id is downloaded, a file of another format is converted. A dtype `auto` becomes the faster
    one here.

    Raises:
        UserError: A model cannot be downloaded, or a file cannot be converted.
    """
    path = config.model.path
    if path:
        path = _converted(path)
    resolved: Root = _with_dtypes(replace(config, model=replace(config.model, path=path)))
    return resolved


def _converted(path: str) -> str:
    """Return the model folder of a hub id or a file of another format; else `path` itself."""
    converters: list[ModelFormat] = entries.hooks("model_format")
    return str(entries.first_result(converters, path) or path)


def _with_dtypes(config: Any) -> Any:
    """Return a copy of a config object whose dtypes `auto` are the faster ones of this machine."""
    if isinstance(config, ServedModelConfig | FSDPConfig) and config.dtype == "auto":
        return replace(config, dtype=_announced_dtype())
    changed = dict[str, Any]()
    for field in fields(config):
        part = getattr(config, field.name)
        if is_dataclass(part):
            resolved = _with_dtypes(part)
            if resolved is not part:
                changed[field.name] = resolved
    return replace(config, **changed) if changed else config


@cache
def _announced_dtype() -> str:
    """Return the dtype of `auto`; the first call prints it."""
    # Importing torch takes a second, and configs without `auto` do not need it here.
    from arealite.impl.weights.fast_dtype import fast_dtype

    dtype, reason = fast_dtype()
    print(f"dtype=auto: {dtype}, because {reason}", file=sys.stderr, flush=True)
    return dtype


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


def check_names(config: ExperimentConfig) -> None:
    """Check the names of the run, the names of all parts, and the loggers.

    Raises:
        UserError: A name of the run is no valid folder name, a part is unknown, or a logger cannot
            be used.
    """
    name_dir(config)
    for _, node in base_config.nodes(config):
        for item in fields(node):
            table = TABLES.get(base_config.kind_of(item))
            if table is None:
                continue
            selected = getattr(node, item.name)
            for name in [selected] if isinstance(selected, str) else selected:
                table.check(name)
    for name in config.logger.types:
        loggers.get(name).check()


def own_server(config: ExperimentConfig) -> ServerConfig:
    """Return the config of the LLM servers that the run starts."""
    overrides = server_overrides(config)
    server = load(ServerConfig, CONFIG_DIR / "llm_server.yaml", overrides)
    resolved: ServerConfig = _with_dtypes(server)
    return resolved


def resolve_host(config: Root) -> Root:
    """Replace `cluster.host=auto` by the address of this host, which clients reach directly."""
    if config.cluster.host == "auto":
        config = replace(config, cluster=replace(config.cluster, host=own_address()))
    bypass_proxies(config.cluster.host)
    return config


def parse_stages(argv: Sequence[str], *, command: str, description: str) -> list[ExperimentConfig]:
    """Parse the command line of `train`; return the config of each stage.

    Without an extension that reads stages, there is one.

    Raises:
        UserError: See load; or a stage has no model.
    """
    line = options.CommandLine(
        command=command,
        description=description,
        schema=ExperimentConfig,
        default=CONFIG_DIR / "async_ppo.yaml",
    )
    parsers: list[StageParser] = entries.hooks("stages")
    stages = entries.first_result(parsers, line, argv)
    if stages is None:
        layers = line.parse(argv)
        stages = [load(ExperimentConfig, layers.files, layers.overrides)]
    return [with_model(config) for config in stages]


def field_names(config: object) -> Sequence[str]:
    """Return the names of a config's options; none for an object that is no config."""
    return [*getattr(config, "__dataclass_fields__", ())]


def read_layers(layers: options.Layers) -> list[base_config.DictConfig]:
    """Read overrides and files without a schema, highest priority first."""
    files = [base_config.read(file) for file in reversed(layers.files)]
    return [base_config.dotlist(layers.overrides), *files]


def _words(layers: object) -> set[str]:
    """Return every key and text in layers of options: a part's name is one of them."""
    if isinstance(layers, base_config.DictConfig):
        layers = base_config.unresolved(layers)
    if isinstance(layers, str):
        return {layers}
    if isinstance(layers, dict):
        options = cast(dict[object, object], layers)
        names = {str(name) for name in options}
        return names.union(*map(_words, options.values()))
    if isinstance(layers, Sequence):
        return set[str]().union(*map(_words, cast(Sequence[object], layers)))
    return set()


def _imports(layers: Sequence[base_config.DictConfig]) -> list[str]:
    """Return the option `imports`; the imported modules extend the schema."""
    for layer in layers:
        if layer.get("imports") is not None:
            if isinstance(layer.imports, str):
                raise UserError(
                    f"imports={layer.imports} is no list. Write imports=[{layer.imports}]."
                )
            return [str(name) for name in layer.imports]
    return []
