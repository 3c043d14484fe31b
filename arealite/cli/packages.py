"""Checks that the optional packages of a run's options are installed, before any process starts."""

from arealite.api.env import envs
from arealite.api.env_config import EnvConfig
from arealite.api.experiment_config import ExperimentConfig
from arealite.base.extras import check_installed, extra_requirement
from arealite.cli import configs
from arealite.ext.tools.config import ToolsEnvConfig

ENVS = {
    "browser": ("playwright", extra_requirement("browser")),
    "webarena": ("playwright", extra_requirement("browser")),
    "reasoning_gym": ("reasoning_gym", extra_requirement("envs")),
    "textarena": ("textarena", extra_requirement("envs")),
    "gymnasium": ("gymnasium", extra_requirement("envs")),
    "gyllm": ("gyllm", "gyllm"),
    "verifiers": ("verifiers", extra_requirement("verifiers")),
}
"""The module that an environment imports, and its requirement for pip, by environment."""


def check_training_packages(config: ExperimentConfig) -> None:
    """Check the optional modules that the processes of a training run import.

    Raises:
        UserError: A module is not installed.
    """
    trainer = config.trainer
    engine = config.trainer.own.engine
    section = "trainer.offline" if trainer.is_offline else "trainer.ppo"
    peft = extra_requirement("lora")
    if engine.type == "fsdp" and engine.fsdp.lora.rank:
        option = f"{section}.engine.fsdp.lora.rank={engine.fsdp.lora.rank}"
        check_installed("peft", peft, option)
    if config.model.adapter:
        check_installed("peft", peft, f"model.adapter={config.model.adapter}")
    if config.launcher.type == "ray":
        check_installed("ray", extra_requirement("ray"), "launcher.type=ray")
    if not trainer.is_offline:
        check_sampling_packages(config)


def check_sampling_packages(config: ExperimentConfig) -> None:
    """Check the optional modules that the environments and servers of a run import.

    Raises:
        UserError: A module is not installed.
    """
    collector = config.trainer.ppo.collector
    launcher = config.launcher
    for name, part in collector.parts.items():
        section = f"envs.{name}.env" if collector.envs else "env"
        if part.env.runtime.type in ("in_process", "subprocess"):  # else it is not imported here
            _check_env(part.env, f"trainer.ppo.collector.{section}")
    if launcher.llm_servers and launcher.type == "local":
        server = configs.own_server(config).llm_server
        if server.type == "sglang" and not server.sglang.python:
            option = f"launcher.server_args={launcher.server_args}"
            check_installed("sglang", extra_requirement("sglang"), option)


def _check_env(env: EnvConfig, section: str) -> None:
    base = envs.base_of(env.type)
    options = envs.options(env)
    if base in ENVS and not getattr(options, "factory", ""):
        module, requirement = ENVS[base]
        check_installed(module, requirement, f"{section}.type={env.type}")
    if isinstance(options, ToolsEnvConfig):
        tools = extra_requirement("tools")
        if options.mcp:
            check_installed("mcp", tools, f"{section}.{env.type}.mcp")
        if "python" in options.tools and options.python.backend == "monty":
            check_installed("pydantic_monty", tools, f"{section}.{env.type}.python.backend=monty")
