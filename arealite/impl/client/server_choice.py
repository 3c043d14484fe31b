"""Chooses the server of a request: that of its group if possible, else the least loaded.

No I/O: the directory updates the state of the servers, and the client calls `Router.pick`.
"""

import math
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from arealite.api.server_protocol import MARK, ServerProtocol, adapter_name, adapter_of
from arealite.impl.client.answer_checks import parse_version
from arealite.impl.http_client import ServerEndpoint
from arealite.system.health.waits import Wait

STICKY_GROUPS = 8192
"""Groups whose server is remembered; far more than are in flight."""


class SentRequest(NamedTuple):
    """A request in flight."""

    rid: str
    adapter: str
    """As in LLMRequest."""
    version_name: str
    """The name of a version that it has; "": the adapter's own name, or none."""


@dataclass(eq=False, kw_only=True)
class LLMServerState:
    """The state of one server in this client."""

    id: str
    address: str
    protocol: ServerProtocol
    version: int = 0
    """Newest policy version in its registry entry or in one of its answers."""
    adapter_versions: dict[str, int] = field(default_factory=dict[str, int])
    """The newest version of each adapter in the server's entry, which requests may name."""
    version_names: dict[str, str] = field(default_factory=dict[str, str])
    """The name of the version of each adapter that `LLMClient.switch_adapter` has set. "-1": the
    server has no version of it."""
    serves_adapter: bool = False
    """Whether this version is an adapter, which requests must name."""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    """Sent with every request: the bearer token."""
    vocab_size: int | None = None
    """None: unknown; prompts are then not checked."""
    context_length: int | None = None
    alive: bool = False
    """Whether its entry is fresh and no request has failed since the entry was renewed."""
    entry_stale_since: float = -math.inf
    """Monotonic time at which a request failed, or found older weights than the entry states. The
    entry is ignored until it is renewed after that time."""
    in_flight: int = 0
    served: int = 0
    waits: dict[Wait, SentRequest] = field(default_factory=dict[Wait, SentRequest])
    """The requests in flight, and their waits, so that they can leave a lost server at once."""

    def __post_init__(self) -> None:
        url = self.address + self.protocol.generate_path
        self.endpoint = ServerEndpoint(url, self.headers)
        self.name = f"llm_server-{self.id}"

    def version_of(self, adapter: str) -> int:
        """Return the newest version of an adapter, or of the policy; -1: no such adapter."""
        if not adapter:
            return self.version
        if adapter in self.version_names:
            return parse_version(self.version_names[adapter])
        return self.adapter_versions.get(adapter, -1)

    def version_name(self, adapter: str) -> str:
        """Return the name that requests for an adapter must have, or those for the policy ("").

        "" if they have the adapter's own name, or none.
        """
        if not adapter:
            return adapter_name(self.version) if self.serves_adapter else ""
        name = self.version_names.get(adapter, "")
        return name if MARK in name else ""

    def set_label(self, label: str | int | None, adapter: str = "") -> None:
        """Set the version that the server reports of the policy, or of an adapter."""
        if adapter in self.version_names:
            self.version_names[adapter] = str(label)
            return
        if adapter:
            self.adapter_versions[adapter] = parse_version(label)
            return
        self.version = parse_version(label)
        self.serves_adapter = bool(adapter_of(label))

    def can_sample(self, min_version: int, adapter: str = "") -> bool:
        """Return whether the server is reachable and holds `min_version` or a newer version."""
        has_base_weights = not adapter or self.version >= 0
        return self.alive and has_base_weights and self.version_of(adapter) >= min_version

    def mark_entry_stale(self) -> None:
        """Ignore the registry entry until it is renewed."""
        self.entry_stale_since = time.monotonic()

    def remove_from_traffic(self) -> None:
        """Send no further requests to the server, and interrupt those in flight."""
        self.alive = False
        for wait in self.waits:
            wait.expire()


class Router:
    """Chooses servers; keeps each group on one server, for the server's prefix cache."""

    def __init__(self) -> None:
        self.servers: dict[str, LLMServerState] = {}
        self._groups: dict[str, LLMServerState] = {}

    def pick(
        self,
        group_id: str,
        min_version: int,
        avoid: LLMServerState | None = None,
        *,
        adapter: str = "",
    ) -> LLMServerState | None:
        """Return the server for a request of a group, or None while no server can take it.

        Args:
            min_version: the oldest policy version that may sample the request.
            avoid: a server that has just failed; it is chosen only if there is no other.
            adapter: the adapter that samples, of which `min_version` is a version.
        """
        last = self._groups.get(group_id)
        if last is not None and last.can_sample(min_version, adapter) and last is not avoid:
            return last
        servers = self.servers.values()
        able = [server for server in servers if server.can_sample(min_version, adapter)]
        if not able:
            return None
        others = [server for server in able if server is not avoid]
        server = min(
            others,
            key=lambda server: (server.in_flight, server.served),
            default=able[0],
        )
        if len(self._groups) >= STICKY_GROUPS:
            del self._groups[next(iter(self._groups))]
        self._groups[group_id] = server
        return server

    def no_server_reason(self, min_version: int, adapter: str = "") -> str:
        """Return why no server can take a request, for an error message."""
        if not self.servers:
            return "no server is registered"
        states: list[str] = []
        for server in self.servers.values():
            state = f"version {server.version_of(adapter)}" if server.alive else "unreachable"
            states.append(f"{server.id} ({server.address}): {state}")
        needed = f"adapter '{adapter}', version" if adapter else "version"
        return f"no server can take a request of {needed} >= {min_version}: {', '.join(states)}"
