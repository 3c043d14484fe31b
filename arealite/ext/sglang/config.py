"""Options of SGLang servers."""

from collections.abc import Iterator
from dataclasses import dataclass

from arealite.api.fields import Package, opt, sub
from arealite.base.extras import extra_requirement
from arealite.ext.server_processes.config import ServerProcessOptions


@dataclass(frozen=True, kw_only=True)
class SGLangServerConfig(ServerProcessOptions):
    """SGLang servers on this host: supervised processes of `sglang.launch_server`."""

    python: str | None = opt(None, "path of a Python with sglang; null: this one")
    dp: int = opt(1, "data parallelism: copies in one server; disk publisher only", at_least=1)
    extra_args: list[str] = sub(list, "further arguments of sglang.launch_server")
    adapter_targets: list[str] = sub(
        lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "layers that may have an adapter, if adapter_rank > 0",
    )
    mem_fraction: float | None = opt(
        None, "share of GPU memory for weights and KV; null: SGLang's default", above=0, below=1
    )
    attention_backend: str | None = opt(None, "null: SGLang's default, torch_native on a CPU")

    def packages(self) -> Iterator[Package]:
        """Yield the package of SGLang, unless another Python has it."""
        if not self.python:
            yield Package("sglang", extra_requirement("sglang"))
