"""Weight publishers update every server to a new policy version while requests are in flight."""

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
    """Costs of one publish. Seconds are those of the slowest server."""

    version: int
    stage_s: float = 0.0
    """Gathering and writing, before any pause."""
    pause_s: float = 0.0
    load_s: float = 0.0
    continue_s: float = 0.0
    stall_s: float = 0.0
    """From the effect of the pause to the effect of the continue: generation paused this long."""
    num_bytes: int = 0
    servers: int = 1
    """Servers that confirmed the version."""
    quarantined: list[str] = field(default_factory=list[str])
    """Ids of servers that failed; they get no traffic until they hold the newest version."""


class WeightPublisher(ABC):
    """Publishes from trainer rank 0; the other ranks only take part in gathering."""

    wants_device = False
    """Whether `stage` takes tensors where the engine has them, not on the CPU."""

    @abstractmethod
    def __init__(self, config: ExperimentConfig, engine: TrainEngine) -> None:
        """Start publishing for an experiment whose trainer trains `engine`.

        Raises:
            UserError: This publisher cannot publish the parameters of that engine.
        """

    def pause_generation(self) -> None:  # noqa: B027  (most have nothing to do)
        """Pause an in-process generator until `stage`: its parameters are about to change.

        Raises:
            RoleError: The generator does not answer.
        """

    @abstractmethod
    def stage(self, version: int, weights: Iterator[tuple[str, torch.Tensor]]) -> bool:
        """Take the weights of a version. When this returns, they may change.

        Args:
            version: The version.
            weights: Name and tensor of each parameter, used up.

        Returns:
            Whether the weights are needed again: call again with a new iterator.

        Raises:
            RoleError: The weights cannot be staged, or no server confirmed them.
        """

    @abstractmethod
    def push(self, version: int) -> PublishReport:
        """Update every server to the staged version; may run beside training.

        Returns:
            The costs, after every server in traffic has confirmed the version.

        Raises:
            RoleError: No server confirmed the version.
        """

    @property
    def needs_republish(self) -> bool:
        """Whether a server lacks the newest version and can get it only through `stage`."""
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
