"""The runtime `in_process`: the environment runs in the rollout worker."""

from arealite.api.env import Env, EnvConfig, envs
from arealite.api.trial import TrialConfig


def in_process(
    args: TrialConfig,
    config: EnvConfig,
) -> Env:
    """Create an environment in this process."""
    env_class = envs.get(config.type)
    options = envs.options(config)
    return env_class(args, options)
