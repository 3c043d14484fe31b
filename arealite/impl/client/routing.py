"""Which server gets a request: a group's server if it may have traffic, else the least loaded one.

Pure bookkeeping without I/O: the directory keeps the servers' state up to date, the client asks.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from yarl import URL

from arealite.system.health.waits import Wait

STICKY_GROUPS = 8192
"""Groups whose server is remembered; far more than are in flight."""


@dataclass(eq=False)
class Server:
    """One server, as this client knows it."""

    id: str
    address: str
    version: int = 0
    """Newest policy version that its name or an answer of it says."""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    """Of every request: the token that the server asks for."""
    vocab_size: int | None = None
    """None where nobody told: prompts are then not checked."""
    context_length: int | None = None
    alive: bool = False
    """Its name is fresh, and no request has failed at it since its name was renewed."""
    doubted: float = -math.inf
    """When a request last failed at it, or found older weights than its name says. Its entry counts
    again when it is renewed after that."""
    in_flight: int = 0
    served: int = 0
    waits: dict[Wait, None] = field(default_factory=dict[Wait, None])
    """One a request in flight, so that a lost server can be left at once."""

    def __post_init__(self) -> None:
        self.generate_url = URL(f"{self.address}/generate")
        self.name = f"llm_server-{self.id}"

    def doubt(self) -> None:
        """Ignore its entry until it is renewed."""
        self.doubted = time.monotonic()

    def lose(self) -> None:
        """Take it out of traffic and interrupt what waits for it."""
        self.alive = False
        for wait in self.waits:
            wait.expire()


class Router:
    """Chooses servers; remembers which group went where, for the servers' prefix caches."""

    def __init__(self) -> None:
        self.servers: dict[str, Server] = {}
        self._groups: dict[str, Server] = {}

    def pick(
        self, group_id: str, min_version: int, *, avoid: Server | None = None
    ) -> Server | None:
        """Return the server for a request of a group, or None while no server may have it.

        `avoid` has just failed and gets the request only if there is no other.
        """
        held = self._groups.get(group_id)
        if held is not None and held.alive and held.version >= min_version and held is not avoid:
            return held
        able = [s for s in self.servers.values() if s.alive and s.version >= min_version]
        if not able:
            return None
        others = (s for s in able if s is not avoid)
        server = min(others, key=lambda s: (s.in_flight, s.served), default=able[0])
        if len(self._groups) >= STICKY_GROUPS:
            del self._groups[next(iter(self._groups))]
        self._groups[group_id] = server
        return server

    def why_none(self, min_version: int) -> str:
        """Say why no server may have a request, for an error message."""
        if not self.servers:
            return "no server is registered"
        states = (
            f"{s.id} ({s.address}): " + (f"version {s.version}" if s.alive else "unreachable")
            for s in self.servers.values()
        )
        return f"none may have a request of version >= {min_version}: {', '.join(states)}"
