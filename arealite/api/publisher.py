"""Weight publishers bring a new policy version to every server while requests are in flight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from arealite.api.fields import opt, sub
from arealite.base.registry import Registry

if TYPE_CHECKING:
    import torch


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
    port: int = opt(0, "where rank 0 waits for the servers, at cluster.host; 0 takes a free port")


@dataclass(frozen=True, kw_only=True)
class PublisherConfig:
    """How new weights reach the servers."""

    type: str = opt("disk", "disk, distributed (a process group) or tensor (in the request's body)")
    pause_mode: Literal["retract", "in_place", "abort"] = opt(
        "retract", "recompute prefixes, keep the old KV, or abort and resubmit"
    )
    timeout_s: float = opt(60.0, "for one server to take a version; it is quarantined after that")
    bucket_mb: int = opt(256, "weights travel in buckets of this size ; files, too")
    verify_every: int = opt(
        1, "compare what the servers hold after each n-th version; 0 never does"
    )
    disk: DiskPublisherConfig = sub(DiskPublisherConfig, "options of type=disk")
    distributed: DistributedPublisherConfig = sub(
        DistributedPublisherConfig, "options of type=distributed"
    )


@dataclass(frozen=True)
class PublishReport:
    """What one publish cost. Seconds are of the slowest server."""

    version: int
    stage_s: float
    """Gathering and writing, before any pause."""
    pause_s: float
    load_s: float
    continue_s: float
    stall_s: float
    """From the pause taking effect to the continue taking effect: generation stood still this
    long."""
    num_bytes: int
    servers: int
    """Servers that confirmed the version."""
    quarantined: list[str]
    """Server ids that failed; they get no traffic until they hold the newest version."""
    verify_s: float = 0.0
    """Comparing what servers hold, while they generate."""


class WeightPublisher(ABC):
    """Lives on trainer rank 0; the other ranks only take part in gathering."""

    wants_device = False
    """Whether `stage` takes tensors where the engine has them, not on the CPU."""

    @abstractmethod
    def stage(self, version: int, weights: Iterator[tuple[str, torch.Tensor]]) -> bool:
        """Take the weights of a version; return once they may change, having used up `weights`.

        True: they are needed again, for the servers that are left; call again with a new iterator.

        Raises:
            RoleError: they cannot be staged, or no server took them.
        """

    @abstractmethod
    def push(self, version: int) -> PublishReport:
        """Bring every server to the staged version; may run beside training. Return when all in
        traffic have confirmed it.

        Raises:
            RoleError: no server confirmed it.
        """

    @property
    def starving(self) -> bool:
        """Whether a server lacks the newest version and can have it only through `stage`."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Stop watching for servers and remove staged files."""


publishers: Registry[WeightPublisher] = Registry(
    "weight_publisher",
    {
        "disk": "arealite.impl.publisher.disk:DiskPublisher",
        "distributed": "arealite.impl.publisher.distributed:DistributedPublisher",
        "tensor": "arealite.impl.publisher.tensor:TensorPublisher",
    },
)
