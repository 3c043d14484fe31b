"""Where an environment runs: in the worker, in a process of its own, or on another host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from arealite.api.fields import opt, sub


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Where an environment's episodes run; the agents always stay in the rollout worker."""

    type: Literal["in_process", "subprocess", "remote"] = opt(
        "in_process", "subprocess: survives crashes and leaks of the environment"
    )
    addresses: list[str] = sub(list, "host:port of each `arealite serve` of type=remote")
