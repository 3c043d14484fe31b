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
class PublisherConfig:
    """How new weights reach the servers."""

    type: str = opt("disk", "name in the table of weight publishers")
    pause_mode: Literal["retract", "in_place", "abort"] = opt(
        "retract", "recompute prefixes, keep the old KV, or abort and resubmit"
    )
    timeout_s: float = opt(60.0, "for one server to take a version; it is quarantined after that")
    disk: DiskPublisherConfig = sub(DiskPublisherConfig, "options of type=disk")


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


class WeightPublisher(ABC):
    """Lives on trainer rank 0; the other ranks only take part in gathering."""

    @abstractmethod
    def publish(self, version: int, weights: Iterator[tuple[str, torch.Tensor]]) -> PublishReport:
        """Stage, pause, load, continue; return when every server in traffic has confirmed
        `version`.

        Raises:
            RoleError: no server confirmed it.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop watching for servers and remove staged files."""


publishers: Registry[WeightPublisher] = Registry(
    "weight_publisher", {"disk": "arealite.impl.publisher.disk:DiskPublisher"}
)
