"""Options that all kinds of server programs have."""

from dataclasses import dataclass
from typing import Literal

from arealite.api.fields import ServerOptions, opt, sub


@dataclass(frozen=True, kw_only=True)
class ServerProcessOptions(ServerOptions):
    """Supervised processes of a server program on this host."""

    python: str | None = opt(None, "path of a Python with the server's package; null: this one")
    num_servers: int = opt(1, "servers here; server i has port + i and its own devices", at_least=1)
    device: Literal["auto", "cpu", "cuda"] = opt("auto", "auto: cuda if the host has a GPU")
    tp: int = opt(1, "tensor parallelism: devices of one copy of the model", at_least=1)
    dp: int = opt(1, "data parallelism: copies in one server", at_least=1)
    adapter_rank: int = opt(
        0,
        "largest rank of adapters that servers load while they run; 0: they load none",
        at_least=0,
    )
    adapters_per_batch: int = opt(
        2,
        "largest number of adapters in one batch, if adapter_rank > 0; other requests wait",
        at_least=2,
    )
    extra_args: list[str] = sub(list, "further arguments of the server's program")
    start_timeout_s: float = opt(600.0, "timeout of a server's start", above=0)
    silence_s: float = opt(30.0, "kill and restart a server that is silent this long", above=0)
    drain_timeout_s: float = opt(10.0, "time for open requests to end after SIGTERM", at_least=0)
    max_restarts: int = opt(10, "consecutive starts failing in a minute; then give up", at_least=0)
