"""Options of the gateway: the HTTP server through which foreign agents generate."""

from dataclasses import dataclass
from typing import Literal

from arealite.api.fields import opt


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """Address, limits and sampling of the gateway of an environment."""

    host: str = opt("", "address to bind; '': loopback; other than loopback: open to the network")
    port: int = opt(0, "port; 0: a free port for each worker", at_least=0, at_most=65535)
    public_host: str = opt(
        "", "host name in the agents' URLs, like host.docker.internal; '': the bound address"
    )
    model: str = opt("policy", "model name that agents are given; requests may name any model")
    sampling: Literal["run", "request"] = opt(
        "run", "run: temperature and top_p of collector.sampling; request: of each request"
    )
    parser: str = opt("auto", "format of thoughts and tool calls; auto: by the chat template")
    max_body_mb: int = opt(16, "longest body of a request", at_least=1, at_most=1024)
    max_in_flight: int = opt(64, "concurrent requests of one session", at_least=1)
    token_env: str = opt("", "environment variable with the token that agents need to take tasks")
