"""How new weights reach the servers: the ways and their options.

Apart from the contract in `publisher`, because people read and write these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from arealite.api.fields import opt, sub


@dataclass(frozen=True, kw_only=True)
class DiskPublisherConfig:
    """Weights go through a safetensors file that the servers read."""

    dir: str | None = opt(
        None, "a folder all servers see; null: tmpfs if all share this host, else the run's folder"
    )


@dataclass(frozen=True, kw_only=True)
class DistributedPublisherConfig:
    """Weights go through a process group of trainer rank 0 and all servers."""

    backend: Literal["auto", "gloo", "nccl"] = opt("auto", "auto: nccl on GPUs, else gloo")
    port: int = opt(0, "of rank 0, at cluster.host; 0 takes a free port", at_least=0, at_most=65535)


@dataclass(frozen=True, kw_only=True)
class SharedPublisherConfig:
    """No other server: the trainer's process serves the parameters it trains, while it waits."""

    max_running_requests: int = opt(256, "requests decoded together; more wait", at_least=1)


@dataclass(frozen=True, kw_only=True)
class PublisherConfig:
    """How new weights reach the servers."""

    type: str = opt(
        "disk",
        "disk, distributed (a process group) or shared (the trainer's own process generates, from "
        "the parameters it trains)",
    )
    pause_mode: Literal["retract", "in_place", "abort"] = opt(
        "retract", "recompute prefixes, keep the old KV, or abort and resubmit"
    )
    timeout_s: float = opt(60.0, "for a server to take a version, else it is quarantined", above=0)
    continue_paused: bool = opt(
        True, "continue a server that another client paused; false: for servers shared on purpose"
    )
    bucket_mb: int = opt(256, "weights travel in buckets of this size ; files, too", at_least=1)
    disk: DiskPublisherConfig = sub(DiskPublisherConfig, "options of type=disk")
    distributed: DistributedPublisherConfig = sub(
        DistributedPublisherConfig, "options of type=distributed"
    )
    shared: SharedPublisherConfig = sub(SharedPublisherConfig, "options of type=shared")
