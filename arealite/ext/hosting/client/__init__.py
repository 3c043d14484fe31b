"""Environments outside the rollout worker: servers, sessions and child processes."""

from functools import partial

from arealite.api.env import Env, envs
from arealite.api.env_config import EnvConfig
from arealite.api.trial import TrialConfig


def make_env(args: TrialConfig, config: EnvConfig) -> Env:
    """Create an environment where `config.runtime` places it: in this process or in servers.

    Call its `setup` before the first episode.

    Args:
        args: The run's config.
        config: The environment's type, options and runtime.

    Raises:
        UserError: An option of the runtime is missing, or Docker.
    """
    runtime = config.runtime
    env_class = envs.get(config.type)
    if runtime.type == "docker":
        from arealite.ext.hosting.client.docker import Containers, check_docker

        check_docker(runtime)
        if hasattr(env_class, "containers"):  # the environment talks to servers itself
            env = env_class(args, envs.options(config))
            setattr(env, "containers", partial(Containers, args, config))  # noqa: B010
            return env
    if runtime.type == "in_process":
        return env_class(args, envs.options(config))
    from arealite.ext.hosting.client.remote import RemoteEnv  # costs the import of aiohttp

    return RemoteEnv(args, config)
