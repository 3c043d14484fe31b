"""Options of the publisher of a process group."""

from dataclasses import dataclass
from typing import Literal

from arealite.api.fields import PublisherOptions, opt
from arealite.base.folder_checks import check_address


@dataclass(frozen=True, kw_only=True)
class DistributedPublisherConfig(PublisherOptions):
    """The publisher that broadcasts in a process group of trainer rank 0 and all servers."""

    backend: Literal["auto", "gloo", "nccl"] = opt("auto", "auto: nccl on GPUs, else gloo")
    port: int = opt(0, "port of rank 0 on cluster.host; 0: a free port", at_least=0, at_most=65535)

    def check_host(self, host: str) -> None:
        """Check that rank 0 can listen at `host` and `port`."""
        check_address(host, self.port, at="trainer.ppo.publisher.distributed")
