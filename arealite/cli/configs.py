"""Load the root configs, with the parts that `imports` and installed packages register."""

import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar

from arealite.api.engine_config import FSDPConfig
from arealite.api.experiment_config import (
    ExperimentConfig,
    ServedModelConfig,
    ServerConfig,
    name_dir,
)
from arealite.api.hooks import ModelFormat, StageParser
from arealite.api.logger import loggers
from arealite.base import config as base_config
from arealite.base import config_tree, entries
from arealite.base.config import Layer, read_layers
from arealite.base.errors import UserError
from arealite.base.host import has_bfloat16
from arealite.base.trial_files import RunPaths
from arealite.cli import options, resolved
from arealite.cli.options import CONFIG_DIR
from arealite.cli.resolved import TABLES
from arealite.impl.launcher.processes import server_overrides

Files = Path | Sequence[Path]
C = TypeVar("C")
Root = TypeVar("Root", bound=ExperimentConfig | ServerConfig)


def load(schema: type[C], files: Files, overrides: Sequence[str], *, is_saved: bool = False) -> C:
    """Import plugins, then load files and overrides as `schema`.

    Args:
        schema: The root config class.
        files: YAML files; later ones win. Or one resolved config, without overrides.
        overrides: Items like "a.b=1"; they win over files.
        is_saved: See base.config.load.

    Raises:
        UserError: See base.config.load; or a plugin cannot be imported.
    """
    files = [files] if isinstance(files, Path) else files
    is_resolved = [file.suffix for file in files] == [config_tree.SUFFIX]
    if is_resolved and not overrides:
        return resolved.load(schema, files[0], has_all_parts=False)
    return merge(schema, read_layers(files, overrides), is_saved=is_saved)


def merge(schema: type[C], layers: Sequence[Layer], *, is_saved: bool = False) -> C:
    """Import plugins, then merge layers as `schema`; see load."""
    plain_layers = [base_config.unresolved(layer.options) for layer in layers]
    parts = resolved.import_parts(imports_of(layers), resolved.words_of(plain_layers))
    resolved.check_derived()
    return base_config.load(schema, layers, parts, is_saved=is_saved)


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
    ready: Root = _with_dtypes(replace(config, model=replace(config.model, path=path)))
    return ready


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
            ready = _with_dtypes(part)
            if ready is not part:
                changed[field.name] = ready
    return replace(config, **changed) if changed else config


@cache
def _announced_dtype() -> str:
    """Return the dtype of `auto`; the first call prints it."""
    dtype, reason = fast_dtype()
    print(f"dtype=auto: {dtype}, because {reason}", file=sys.stderr, flush=True)
    return dtype


def fast_dtype() -> tuple[str, str]:
    """Return the dtype that the hardware computes fast, bfloat16 or float32, and the reason.

    Without instructions for bfloat16, matrix products in bfloat16 take a hundred times as long.
    """
    import torch  # takes a second, and configs without `auto` do not need it

    if not torch.cuda.is_available():
        if has_bfloat16():
            return "bfloat16", "the processor has instructions for bfloat16"
        return "float32", "there is no GPU, and the processor has no instructions for bfloat16"
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        return "float32", "the GPU has no bfloat16"
    return "bfloat16", "the GPU has bfloat16"


def check_names(config: ExperimentConfig) -> None:
    """Check the names of the run, the names of all parts, and the loggers.

    Raises:
        UserError: A name of the run is no valid folder name, a part is unknown, or a logger cannot
            be used.
    """
    name_dir(config)
    for _, node in config_tree.nodes(config):
        for item in fields(node):
            table = TABLES.get(config_tree.kind_of(item))
            if table is None:
                continue
            selected = getattr(node, item.name)
            for name in [selected] if isinstance(selected, str) else selected:
                table.check(name)
    for name in config.logger.types:
        loggers.get(name).check()


def own_server(config: ExperimentConfig) -> ServerConfig:
    """Return the config of the LLM servers that the run starts."""
    server: ServerConfig = _with_dtypes(_load_server(tuple(server_overrides(config))))
    return server


def write_server(config: ExperimentConfig, folder: Path) -> Path:
    """Return a new file for `serve-llm FILE`; each server's host resolves the dtype `auto`."""
    file = RunPaths(folder).server
    config_tree.write(_load_server(tuple(server_overrides(config))), file)
    return file


@lru_cache(maxsize=8)
def _load_server(overrides: Sequence[str]) -> ServerConfig:
    return load(ServerConfig, CONFIG_DIR / "llm_server.yaml", overrides)


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


def imports_of(layers: Sequence[Layer]) -> list[str]:
    """Return the option `imports`; the imported modules extend the schema."""
    for layer in reversed(layers):
        modules = layer.options.get("imports")
        if isinstance(modules, str):
            raise UserError(f"imports={modules} is no list. Write imports=[{modules}].")
        if modules is not None:
            return [*map(str, modules)]
    return []
