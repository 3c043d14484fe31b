"""The weight publisher, which updates every server during generation: interface and options."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from arealite.api.fields import named, opt, part, with_options_of
from arealite.base.registry import Registry

if TYPE_CHECKING:
    import torch

    from arealite.api.engine import TrainEngine
    from arealite.api.experiment_config import ExperimentConfig
    from arealite.api.server_protocol import GenerateRequest, ServerAnswer


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
    """Ids of servers that failed. They get no request that needs a newer version than they have."""


Generate = Callable[["GenerateRequest"], Coroutine[Any, Any, "ServerAnswer"]]
"""Sends a request for tokens to one server. A RoleError or OSError says why it failed."""


class PolicyProof(Protocol):
    """Proves that servers generate from the weights that the trainer has sent."""

    def expect(self, version: int) -> None:
        """Note what a server must answer at a version.

        All ranks call it before the weights of the version are staged, perhaps several times.
        """
        ...

    def fingerprinted(
        self, weights: "Iterator[tuple[str, torch.Tensor]]"
    ) -> "Iterator[tuple[str, torch.Tensor]]":
        """Yield the weights that are sent, and note their fingerprint."""
        ...

    def record(self, version: int) -> str:
        """Return the fingerprint and the answers that servers must give, for the ledger."""
        ...

    async def fault(self, server_id: str, version: int, generate: Generate) -> str:
        """Return why a server that reports a version has other weights; "" without a fault.

        A publisher calls it after each update of a server, in its event loop. An error ends the
        publisher.
        """
        ...


class WeightPublisher(ABC):
    """Publishes from trainer rank 0. The other ranks only take part in gathering the weights."""

    takes_device_tensors = False
    """Whether `stage` takes tensors on the engine's device instead of the CPU."""
    proof: PolicyProof | None = None
    """Proves the weights of each updated server."""

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

    @property
    def takes_adapter(self) -> bool:
        """Whether all servers can load the engine's adapter alone, without the base weights."""
        return False

    def stage_adapter(self, version: int, matrices: "Iterator[tuple[str, torch.Tensor]]") -> bool:
        """Read the adapter of a version; see `stage`. Called only if `takes_adapter`."""
        raise NotImplementedError

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


@dataclass(frozen=True, kw_only=True)
class DiskPublisherConfig:
    """The publisher that writes a safetensors file, which the servers read."""

    dir: str | None = opt(None, "shared folder; null: tmpfs on one host, else the run's folder")


@dataclass(frozen=True, kw_only=True)
@with_options_of("weight_publisher")
class PublisherConfig:
    """The publisher, which updates the weights of the servers."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return the options of one type, such as `shared`."""

    type: str = named(
        "weight_publisher",
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
    canary: bool = opt(True, "compare log-probabilities of a fixed row after each server's update")
    bucket_mb: int = opt(256, "size of the buckets in which weights are sent, in MB", at_least=1)
    disk: DiskPublisherConfig = part(DiskPublisherConfig)
