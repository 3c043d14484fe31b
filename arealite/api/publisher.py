"""Weight publishers bring a new policy version to every server while requests are in flight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from arealite.base.registry import Registry

if TYPE_CHECKING:
    import torch

    from arealite.api.config import ExperimentConfig
    from arealite.api.engine import TrainEngine


@dataclass(frozen=True)
class PublishReport:
    """What one publish cost. Seconds are of the slowest server."""

    version: int
    stage_s: float = 0.0
    """Gathering and writing, before any pause."""
    pause_s: float = 0.0
    load_s: float = 0.0
    continue_s: float = 0.0
    stall_s: float = 0.0
    """From the pause taking effect to the continue taking effect: generation stood still this
    long."""
    num_bytes: int = 0
    servers: int = 1
    """Servers that confirmed the version."""
    quarantined: list[str] = field(default_factory=list[str])
    """Server ids that failed; they get no traffic until they hold the newest version."""


class WeightPublisher(ABC):
    """Lives on trainer rank 0; the other ranks only take part in gathering."""

    wants_device = False
    """Whether `stage` takes tensors where the engine has them, not on the CPU."""

    @abstractmethod
    def __init__(self, config: ExperimentConfig, engine: TrainEngine) -> None:
        """Start publishing for an experiment whose trainer trains `engine`.

        Raises:
            UserError: this way cannot publish what that engine trains.
        """

    def hold(self) -> None:  # noqa: B027  (most have nothing to do)
        """Have who generates from the engine's own parameters wait: they are about to change, and
        `stage` lets it go on.

        Raises:
            RoleError: it does not answer.
        """

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
        "shared": "arealite.impl.publisher.shared:SharedPublisher",
    },
)
