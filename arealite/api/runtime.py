"""Where an environment runs: in the worker, in a process of its own, or on another host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from arealite.api.fields import opt, sub


@dataclass(frozen=True, kw_only=True)
class EnvServersConfig:
    """Servers of environments, seen from a rollout worker."""

    addresses: list[str] = sub(list, "host:port or URL of each server; episodes are spread by load")
    token_env: str = opt("", "environment variable with the bearer token that they ask for")
    max_message_kb: int = opt(1024, "longest message, in both directions", at_least=1)
    answer_s: float = opt(300.0, "longest wait for the answer to a step", above=0)
    wait_s: float = opt(60.0, "how long an episode waits for a server with room", above=0)
    silence_s: float = opt(10.0, "a server whose /health is silent for this long is lost", above=0)


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig(EnvServersConfig):
    """Where an environment's episodes run; the agents always stay in the rollout worker."""

    type: Literal["in_process", "subprocess", "remote"] = opt(
        "in_process",
        "subprocess: survives crashes and leaks of the environment; remote: `arealite serve` at "
        "`addresses`",
    )
    processes: int = opt(1, "subprocess: how many share a worker's episodes", at_least=1)
    recycle_episodes: int = opt(0, "subprocess: renewed after so many; 0: never", at_least=0)
    max_memory_mb: int = opt(0, "subprocess: renewed when it holds more; 0: never", at_least=0)
    max_restarts: int = opt(10, "subprocess: deaths in a row with no episode between", at_least=0)
