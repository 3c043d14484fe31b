"""The weight-publisher interface: update every server to a new version during generation."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from arealite.base.registry import Registry

if TYPE_CHECKING:
    import torch

    from arealite.api.engine import TrainEngine
    from arealite.api.experiment_config import ExperimentConfig


@dataclass(frozen=True, kw_only=True)
class PublishReport:
    """Costs of one publish. Durations are those of the slowest server."""

    version: int
    stage_s: float = 0.0
    """Seconds of gathering and writing the weights, before any pause."""
    pause_s: float = 0.0
    load_s: float = 0.0
    continue_s: float = 0.0
    stall_s: float = 0.0
    """Seconds without generation: from the end of the pause request to the end of the continue
    request."""
    num_bytes: int = 0
    servers: int = 1
    """Servers that confirmed the version."""
    quarantined: list[str] = field(default_factory=list[str])
    """Ids of servers that failed. They get no requests until they have the newest version."""


class WeightPublisher(ABC):
    """Publishes from trainer rank 0. The other ranks only take part in gathering the weights."""

    takes_device_tensors = False
    """Whether `stage` takes tensors on the engine's device instead of CPU copies."""

    @abstractmethod
    def __init__(self, config: "ExperimentConfig", engine: "TrainEngine") -> None:
        """Create the publisher of an experiment.

        Args:
            config: The experiment.
            engine: The train engine of the policy.

        Raises:
            UserError: This publisher cannot publish the parameters of that engine.
        """

    def pause_generation(self) -> None:  # noqa: B027  (most have nothing to do)
        """Pause an in-process generator before its parameters change; `stage` ends the pause.

        Raises:
            RoleError: The generator does not answer.
        """

    @abstractmethod
    def stage(self, version: int, weights: "Iterator[tuple[str, torch.Tensor]]") -> bool:
        """Read the weights of a version. After the return, the parameters may change.

        Args:
            version: The version.
            weights: Name and tensor of each parameter; consumed.

        Returns:
            Whether the weights are needed again: call again with a new iterator.

        Raises:
            RoleError: The weights cannot be staged, or no server confirmed them.
        """

    @abstractmethod
    def push(self, version: int) -> PublishReport:
        """Update every server to the staged version; may run during training.

        Returns:
            The costs, after every server that gets requests has confirmed the version.

        Raises:
            RoleError: No server confirmed the version.
        """

    @property
    def needs_republish(self) -> bool:
        """Whether a server needs the newest version, and only `stage` can provide it."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Stop background threads and remove staged files."""


publishers = Registry[type[WeightPublisher]].built_in("weight_publisher")
