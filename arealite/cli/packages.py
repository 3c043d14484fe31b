"""Checks that the optional packages of a run's options are installed, before any process starts."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from arealite.api.config import ExperimentConfig
from arealite.api.env import envs
from arealite.api.env_config import EnvConfig
from arealite.api.tool_config import ToolsEnvConfig
from arealite.base.errors import UserError
from arealite.base.extras import extra_requirement, is_installed
from arealite.cli import configs

ENVS = {
    "browser": ("playwright", extra_requirement("browser")),
    "webarena": ("playwright", extra_requirement("browser")),
    "reasoning_gym": ("reasoning_gym", extra_requirement("envs")),
    "textarena": ("textarena", extra_requirement("envs")),
    "gymnasium": ("gymnasium", extra_requirement("envs")),
    "gyllm": ("gyllm", "gyllm"),
    "verifiers": ("verifiers", extra_requirement("verifiers")),
}
"""By name of an environment: the module that it imports, and its requirement for pip."""


class Need(NamedTuple):
    """A module that an option needs."""

    option: str
    module: str
    requirement: str
    """Argument of `pip install` that installs the module."""


def check_packages(needs: Iterable[Need]) -> None:
    """Check that modules are installed, without importing them.

    Raises:
        UserError: A module is not installed.
    """
    for need in needs:
        if not is_installed(need.module):
            what = f"{need.option} needs the package {need.module}, which is not installed"
            raise UserError(f"{what}: pip install {need.requirement}")


def training_needs(config: ExperimentConfig) -> Iterator[Need]:
    """Yield the optional modules that the processes of a training run import."""
    trainer, engine = config.trainer, config.trainer.own.engine
    section = "trainer.offline" if trainer.is_offline else "trainer.ppo"
    peft = extra_requirement("lora")
    if engine.type == "fsdp" and engine.fsdp.lora.rank:
        yield Need(f"{section}.engine.fsdp.lora.rank={engine.fsdp.lora.rank}", "peft", peft)
    if config.model.adapter:
        yield Need(f"model.adapter={config.model.adapter}", "peft", peft)
    if config.launcher.type == "ray":
        yield Need("launcher.type=ray", "ray", extra_requirement("ray"))
    if not trainer.is_offline:
        yield from sampling_needs(config)


def sampling_needs(config: ExperimentConfig) -> Iterator[Need]:
    """Yield the optional modules that environments and servers of a run import."""
    collector, launcher = config.trainer.ppo.collector, config.launcher
    for name, part in collector.parts.items():
        section = f"envs.{name}.env" if collector.envs else "env"
        if part.env.runtime.type in ("in_process", "subprocess"):  # else it is not imported here
            yield from _env_needs(part.env, f"trainer.ppo.collector.{section}")
    if launcher.llm_servers and launcher.type == "local":
        server = configs.own_server(config).llm_server
        if server.type == "sglang" and not server.sglang.python:
            option = f"launcher.server_args={launcher.server_args}"
            yield Need(option, "sglang", extra_requirement("sglang"))


def _env_needs(env: EnvConfig, section: str) -> Iterator[Need]:
    base, options = envs.base_of(env.type), envs.options(env)
    if base in ENVS and not getattr(options, "factory", ""):
        module, requirement = ENVS[base]
        yield Need(f"{section}.type={env.type}", module, requirement)
    if isinstance(options, ToolsEnvConfig):
        tools = extra_requirement("tools")
        if options.mcp:
            yield Need(f"{section}.{env.type}.mcp", "mcp", tools)
        if "python" in options.tools and options.python.backend == "monty":
            yield Need(f"{section}.{env.type}.python.backend=monty", "pydantic_monty", tools)
