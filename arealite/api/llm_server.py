"""Language-model servers: which one `launch_llm_server` runs, and which others a run uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

from arealite.api.fields import opt, sub
from arealite.base.registry import Registry

UNTRUSTED = "-1"
"""The version of weights that are of no version; clients give such a server no traffic."""


@dataclass(frozen=True, kw_only=True)
class EmbeddedServerConfig:
    """The server for laptops: a transformers model behind SGLang's protocol, one process."""

    max_running_requests: int = opt(256, "requests decoded together; more wait", at_least=1)
    num_threads: int = opt(1, "torch threads on a CPU", at_least=1)
    device: str = opt("auto", "auto, cpu or cuda")
    max_restarts: int = opt(
        5, "restarts in a row of a server that dies before it serves", at_least=0
    )


@dataclass(frozen=True, kw_only=True)
class SGLangServerConfig:
    """SGLang servers on this host: `sglang.launch_server` processes, watched and restarted."""

    python: str | None = opt(
        None, "the Python that has sglang, perhaps of another virtual environment; null: this one"
    )
    num_servers: int = opt(1, "on this host; the i-th takes port + i and next devices", at_least=1)
    device: Literal["auto", "cpu", "cuda"] = opt("auto", "auto: cuda where there is a GPU")
    tp: int = opt(1, "tensor parallelism: devices of one copy of the model", at_least=1)
    dp: int = opt(1, "data parallelism: copies in one server; disk publisher only", at_least=1)
    mem_fraction: float | None = opt(
        None, "share of a device's memory for weights and KV; null: SGLang's", above=0, below=1
    )
    attention_backend: str | None = opt(None, "null leaves it to SGLang; torch_native on a CPU")
    extra_args: list[str] = sub(list, "more arguments of sglang.launch_server, as they are")
    start_timeout_s: float = opt(
        600.0, "longest time from a server's start to its first answer", above=0
    )
    silence_s: float = opt(30.0, "a server silent for this long is killed and restarted", above=0)
    drain_timeout_s: float = opt(10.0, "at SIGTERM: time for requests to end", at_least=0)
    max_restarts: int = opt(
        10, "starts in a row that do not last a minute; then it is given up", at_least=0
    )


@dataclass(frozen=True, kw_only=True)
class LLMServerConfig:
    """Which server `launch_llm_server` starts, and where it listens."""

    type: str = opt("embedded", "name in the table of servers")
    host: str = opt("127.0.0.1", "address to bind; anything but loopback opens it to the network")
    port: int = opt(0, "0 takes a free port", at_least=0, at_most=65535)
    context_length: int | None = opt(
        None, "prompt + output tokens; null takes the model's own limit", at_least=1
    )
    log_level: Literal["debug", "info", "warning", "error"] = opt("info", "what is logged")
    embedded: EmbeddedServerConfig = sub(EmbeddedServerConfig, "options of type=embedded")
    sglang: SGLangServerConfig = sub(SGLangServerConfig, "options of type=sglang")


@dataclass(frozen=True, kw_only=True)
class ExternalServersConfig:
    """Servers that others started, besides those in the name registry."""

    addresses: list[str] = sub(
        list, "host:port of running SGLang servers; used and updated, never stopped"
    )
    api_key_env: str = opt("", "environment variable with their API key; empty: they have none")


class LLMServer(ABC):
    """A server process, seen from the command that runs it."""

    @abstractmethod
    def __init__(self, args: Any) -> None:
        """Take the whole ServerConfig; load nothing yet."""

    @abstractmethod
    async def serve(self) -> None:
        """Load the model, listen, register under the trial's names, and serve until cancelled."""


servers: Registry[LLMServer] = Registry(
    "llm_server",
    {
        "embedded": "arealite.impl.server.embedded:EmbeddedServer",
        "sglang": "arealite.impl.server.sglang:SGLangServer",
    },
)
