"""Create environments where `runtime.type` places them."""

from arealite.api.env import Env, EnvConfig, envs
from arealite.api.runtime import runtimes
from arealite.api.trial import TrialConfig


def make_env(
    args: TrialConfig,
    config: EnvConfig,
) -> Env:
    """Create an environment where `config.runtime` places it.

    Call its `setup` before the first episode.

    Args:
        args: The run's config.
        config: The environment's type, options and runtime.

    Raises:
        UserError: The runtime is unknown, or an option of it is missing.
    """
    make = runtimes.get(config.runtime.type)
    return make(args, config)


def in_process(
    args: TrialConfig,
    config: EnvConfig,
) -> Env:
    """Create an environment in this process."""
    env_class = envs.get(config.type)
    options = envs.options(config)
    return env_class(args, options)
