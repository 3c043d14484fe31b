"""Checks that the optional packages of a run's options are installed, before any process starts."""

from collections.abc import Iterable
from typing import Any

from arealite.api.env import EnvConfig, envs
from arealite.api.experiment_config import ExperimentConfig
from arealite.api.fields import Package
from arealite.api.hooks import RunPackages
from arealite.base import entries
from arealite.base.extras import check_installed
from arealite.cli import configs


def check_training_packages(config: ExperimentConfig) -> None:
    """Check the optional modules that the processes of a training run import.

    Raises:
        UserError: A module is not installed.
    """
    hooks: list[RunPackages] = entries.hooks("packages")
    for packages_of in hooks:
        for package in packages_of(config):
            check_installed(package.module, package.requirement, package.option)
    if not config.trainer.is_offline:
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
        for package in _packages_of(server.selected_options):
            option = f"launcher.server_args={launcher.server_args}"
            check_installed(package.module, package.requirement, option)


def _check_env(env: EnvConfig, section: str) -> None:
    """Check the packages that the environment's options ask for (api.fields.Package)."""
    for package in _packages_of(envs.options(env)):
        option = f"{env.type}.{package.option}" if package.option else f"type={env.type}"
        check_installed(package.module, package.requirement, f"{section}.{option}")


def _packages_of(options: Any) -> Iterable[Package]:
    """Return the optional packages that the options of a part ask for."""
    return options.packages() if hasattr(options, "packages") else ()
