"""Options of vLLM servers."""

from collections.abc import Iterator
from dataclasses import dataclass

from arealite.api.fields import Package, opt, sub
from arealite.base.extras import extra_requirement
from arealite.ext.server_processes.config import ServerProcessOptions


@dataclass(frozen=True, kw_only=True)
class VLLMServerConfig(ServerProcessOptions):
    """vLLM servers on this host: supervised processes of `vllm serve`."""

    python: str | None = opt(None, "path of a Python with vllm; null: this one")
    extra_args: list[str] = sub(list, "further arguments of vllm serve")
    gpu_memory_utilization: float | None = opt(
        None, "share of GPU memory for weights and KV; null: vLLM's default", above=0, at_most=1
    )
    kv_cache_gb: int = opt(2, "GiB of KV cache on a CPU", at_least=1)
    enforce_eager: bool | None = opt(None, "run without compilation; null: only on a CPU")
    max_num_seqs: int | None = opt(
        None, "limit of concurrent requests; null: vLLM's default", at_least=1
    )

    def packages(self) -> Iterator[Package]:
        """Yield the package of vLLM, unless another Python has it."""
        if not self.python:
            yield Package("vllm", extra_requirement("vllm"))
