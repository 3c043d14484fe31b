"""Options of SGLang servers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from arealite.api.fields import Package, ServerOptions, opt, sub
from arealite.base.extras import extra_requirement


@dataclass(frozen=True, kw_only=True)
class SGLangServerConfig(ServerOptions):
    """SGLang servers on this host: supervised processes of `sglang.launch_server`."""

    python: str | None = opt(None, "path of a Python with sglang; null: this one")
    num_servers: int = opt(1, "servers here; server i has port + i and its own devices", at_least=1)
    device: Literal["auto", "cpu", "cuda"] = opt("auto", "auto: cuda if the host has a GPU")
    tp: int = opt(1, "tensor parallelism: devices of one copy of the model", at_least=1)
    dp: int = opt(1, "data parallelism: copies in one server; disk publisher only", at_least=1)
    mem_fraction: float | None = opt(
        None, "share of GPU memory for weights and KV; null: SGLang's default", above=0, below=1
    )
    attention_backend: str | None = opt(None, "null: SGLang's default, torch_native on a CPU")
    extra_args: list[str] = sub(list, "further arguments of sglang.launch_server")
    start_timeout_s: float = opt(600.0, "timeout of a server's start", above=0)
    silence_s: float = opt(30.0, "kill and restart a server that is silent this long", above=0)
    drain_timeout_s: float = opt(10.0, "time for open requests to end after SIGTERM", at_least=0)
    max_restarts: int = opt(10, "consecutive starts failing in a minute; then give up", at_least=0)

    def packages(self) -> Iterator[Package]:
        """Yield the package of SGLang, unless another Python has it."""
        if not self.python:
            yield Package("sglang", extra_requirement("sglang"))
