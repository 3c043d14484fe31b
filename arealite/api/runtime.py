"""Options of an environment's runtime: the worker, a child process, or another host."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arealite.api.fields import named, opt, sub
from arealite.base.registry import Registry

if TYPE_CHECKING:
    from arealite.api.env import Env, EnvConfig
    from arealite.api.trial import TrialConfig


@dataclass(frozen=True, kw_only=True)
class EnvServersConfig:
    """Environment servers that a rollout worker uses."""

    addresses: list[str] = sub(list, "host:port or URL of servers; the least loaded is used first")
    token_env: str = opt("", "environment variable with the servers' bearer token")
    max_message_kb: int = opt(1024, "longest message, in both directions", at_least=1)
    answer_s: float = opt(300.0, "timeout of the answer to a step", above=0)
    wait_s: float = opt(60.0, "longest wait of an episode for a server with capacity", above=0)
    silence_s: float = opt(10.0, "time without a reply of /health until a server is lost", above=0)


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig(EnvServersConfig):
    """The process and host of an environment. Its agents always run in the rollout worker."""

    type: str = named(
        "runtime",
        "in_process",
        "in_process: the worker; subprocess: children of the worker, which may crash or leak; "
        "docker: containers of `image`; remote: `arealite serve` at `addresses`",
    )
    processes: int = opt(1, "number of children or containers of a worker", at_least=1)
    recycle_episodes: int = opt(0, "episodes between restarts of a process; 0: never", at_least=0)
    max_memory_mb: int = opt(0, "memory limit; a child above it is restarted; 0: none", at_least=0)
    max_restarts: int = opt(10, "consecutive crashes without an episode in between", at_least=0)
    image: str = opt("", "docker: an image that serves OpenEnv, or runs `arealite serve`")
    port: int = opt(8000, "docker: port of the server in the image", at_least=1, at_most=65535)
    docker: str = opt("docker", "docker: the program; podman works, too")
    docker_args: list[str] = sub(list, "docker: more arguments of `docker run`, like ['--cpus=2']")


Runtime = Callable[["TrialConfig", "EnvConfig"], "Env"]
"""Creates an environment where it runs, from the run's config and the environment's.

A UserError says which option of the runtime is missing."""

runtimes = Registry[Runtime].built_in("runtime")
