"""Environments outside the rollout worker: servers, sessions and child processes."""

from __future__ import annotations

from arealite.api.env import Env, envs
from arealite.api.env_config import EnvConfig
from arealite.api.trial import TrialConfig


def make_env(args: TrialConfig, config: EnvConfig) -> Env:
    """Create an environment where `config.runtime` places it: in this process or in servers.

    Call its `setup` before the first episode.

    Args:
        args: The run's config.
        config: The environment's type, options and runtime.
    """
    if config.runtime.type == "in_process":
        return envs.get(config.type)(args, envs.options(config))
    from arealite.impl.env_client.remote import RemoteEnv  # costs the import of aiohttp

    return RemoteEnv(args, config)
