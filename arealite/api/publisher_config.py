"""Options of the weight publishers."""

from dataclasses import dataclass
from typing import Literal

from arealite.api.fields import opt, part


@dataclass(frozen=True, kw_only=True)
class DiskPublisherConfig:
    """The publisher that writes a safetensors file, which the servers read."""

    dir: str | None = opt(None, "shared folder; null: tmpfs on one host, else the run's folder")


@dataclass(frozen=True, kw_only=True)
class DistributedPublisherConfig:
    """The publisher that broadcasts in a process group of trainer rank 0 and all servers."""

    backend: Literal["auto", "gloo", "nccl"] = opt("auto", "auto: nccl on GPUs, else gloo")
    port: int = opt(0, "port of rank 0 on cluster.host; 0: a free port", at_least=0, at_most=65535)


@dataclass(frozen=True, kw_only=True)
class SharedPublisherConfig:
    """The publisher of a run without servers: the trainer generates while it waits for a batch."""

    max_running_requests: int = opt(256, "requests decoded together; more wait", at_least=1)


@dataclass(frozen=True, kw_only=True)
class PublisherConfig:
    """The publisher, which updates the weights of the servers."""

    type: str = opt(
        "disk",
        "disk (a file), distributed (a process group) or shared (the trainer's process generates "
        "with the parameters it trains)",
    )
    pause_mode: Literal["retract", "in_place", "abort"] = opt(
        "retract", "open requests: recompute the KV cache, keep it, or abort and resubmit"
    )
    timeout_s: float = opt(60.0, "time to update a server; then it is quarantined", above=0)
    continue_paused: bool = opt(True, "continue servers paused by other clients; false: report it")
    self_check: bool = opt(True, "compare trainer, servers, transformers before the first episode")
    bucket_mb: int = opt(256, "size of the buckets in which weights are sent, in MB", at_least=1)
    disk: DiskPublisherConfig = part(DiskPublisherConfig)
    distributed: DistributedPublisherConfig = part(DistributedPublisherConfig)
    shared: SharedPublisherConfig = part(SharedPublisherConfig)
