"""Options of the weight publishers."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from arealite.api.fields import named, opt, part, with_options_of


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
    bucket_mb: int = opt(256, "size of the buckets in which weights are sent, in MB", at_least=1)
    disk: DiskPublisherConfig = part(DiskPublisherConfig)
