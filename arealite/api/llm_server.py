"""The interface and options of the LLM servers that `launch_llm_server` and `launcher` start."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from arealite.api.fields import named, opt, sub, with_options_of
from arealite.base.registry import Registry

if TYPE_CHECKING:
    from arealite.api.experiment_config import ServerConfig

UNTRUSTED = "-1"
"""Version of a server whose weights belong to no version. Clients send it no requests."""


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

    @property
    def selected_options(self) -> Any:
        """The options of this type; None without any."""
        return getattr(self, self.type, None)


@dataclass(frozen=True, kw_only=True)
class ExternalServersConfig:
    """External servers: running servers that are not in the name registry."""

    addresses: list[str] = sub(list, "host:port of SGLang or vLLM servers to update, never to stop")
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
