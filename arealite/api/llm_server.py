"""The interface and options of the LLM servers that `launch_llm_server` and `launcher` start."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from arealite.api.fields import named, opt, part, sub, with_options_of
from arealite.base.registry import Registry

if TYPE_CHECKING:
    from arealite.api.experiment_config import ServerConfig

UNTRUSTED = "-1"
"""Version of a server whose weights belong to no version. Clients send it no requests."""


@dataclass(frozen=True, kw_only=True)
class SGLangServerConfig:
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


@dataclass(frozen=True, kw_only=True)
@with_options_of("llm_server")
class LLMServerConfig:
    """The server of `launch_llm_server`."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return the options of one type, such as `embedded`."""

    type: str = named("llm_server", "embedded", "registered name of the server")
    host: str = opt("127.0.0.1", "address to bind; other than loopback: open to the network")
    port: int = opt(0, "port; 0: a free port", at_least=0, at_most=65535)
    context_length: int | None = opt(
        None, "limit of prompt plus output, in tokens; null: the model's limit", at_least=1
    )
    log_level: Literal["debug", "info", "warning", "error"] = opt("info", "lowest level to log")
    sglang: SGLangServerConfig = part(SGLangServerConfig)

    @property
    def selected_options(self) -> Any:
        """The options of this type; None without any."""
        return getattr(self, self.type, None)


@dataclass(frozen=True, kw_only=True)
class ExternalServersConfig:
    """External servers: running servers that are not in the name registry."""

    addresses: list[str] = sub(list, "host:port of SGLang servers to update but never to stop")
    api_key_env: str = opt("", "environment variable with their API key; '': no key")


class LLMServer(ABC):
    """A server as `launch_llm_server` runs it."""

    @abstractmethod
    def __init__(self, args: "ServerConfig") -> None:
        """Store the config; load nothing yet."""

    @abstractmethod
    async def serve(self) -> None:
        """Load the model, listen, register under the trial's names, and serve until cancelled."""


servers = Registry[type[LLMServer]].built_in("llm_server")
