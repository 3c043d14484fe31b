"""Loads the root configs, with the parts that `imports` and installed packages add.

The one place that knows which config class belongs to which table.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from arealite.api.agent import AgentConfig, agents
from arealite.api.engine import engines
from arealite.api.engine_config import TrainEngineConfig
from arealite.api.env import EnvConfig, envs
from arealite.api.llm import LLMClientConfig, clients
from arealite.api.llm_server import LLMServerConfig, servers
from arealite.api.publisher import PublisherConfig, publishers
from arealite.api.reward import RewardConfig, rewards
from arealite.api.trainer import TrainerConfig, trainers
from arealite.base import config as base_config
from arealite.base.registry import import_plugins

C = TypeVar("C")

CONFIG_DIR = Path(__file__).resolve().parents[1] / "config"
"""The YAML files, in a checkout (through a link) and in an installed wheel."""


def load(schema: type[C], file: Path, overrides: Sequence[str]) -> C:
    """Import plugins, then load `file` and the overrides as `schema`.

    Raises:
        UserError: see base.config.load; or a plugin cannot be imported.
    """
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    import_plugins(_imports(file, overrides))
    return base_config.load(schema, [file], overrides, parts())


def parts() -> base_config.Parts:
    """Return each part's config class with the configs registered from outside."""
    tables: dict[type, Any] = {
        AgentConfig: agents,
        EnvConfig: envs,
        RewardConfig: rewards,
        LLMClientConfig: clients,
        LLMServerConfig: servers,
        PublisherConfig: publishers,
        TrainEngineConfig: engines,
        TrainerConfig: trainers,
    }
    return {config: table.configs for config, table in tables.items()}


def _imports(file: Path, overrides: Sequence[str]) -> list[str]:
    """Find `imports` before the schema can be known: it decides the schema."""
    for layer in (base_config.dotlist(overrides), base_config.read(file)):
        if layer.get("imports") is not None:
            return [str(name) for name in layer.imports]
    return []
