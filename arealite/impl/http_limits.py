"""Limits of an HTTP server that hold before a handler runs: body sizes and idle connections.

aiohttp alone lets a client that sends its headers or its body slowly hold a connection for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from aiohttp import web

IDLE_S = 60.0
"""A connection is closed after this long without a complete request. It counts from the moment that
the connection was made or its last request was answered: a request that is being answered may take
any time."""
MAX_IDLE, CROWDED_S = 512, 5.0
"""With more than MAX_IDLE such connections, they are closed after CROWDED_S. That is longer than
the rollout workers keep a connection that they do not use."""
SWEEP_S = 1.0
"""How often connections are looked at."""
MAX_BODY = 2**16
"""Bytes of a body, where a route has no other limit."""


class LimitedRunner(web.AppRunner):
    """Runs an application within these limits. A handler finds its body read."""

    def __init__(
        self, app: web.Application, *, bodies: Mapping[str, int], shutdown_timeout: float
    ) -> None:
        """`bodies`: most bytes of a body, by path; MAX_BODY elsewhere."""
        super().__init__(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=shutdown_timeout
        )
        app.middlewares.append(self._serve)
        self._bodies = bodies
        self._busy, self._idle_since = set[Any](), dict[Any, float]()
        self._timer: asyncio.TimerHandle | None = None

    async def setup(self) -> None:
        await super().setup()
        self._sweep()

    async def cleanup(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await super().cleanup()

    @web.middleware
    async def _serve(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Read the body; the connection is not idle from there to the answer."""
        if request.method == "POST":
            most = self._bodies.get(request.path, MAX_BODY)
            request = request.clone(client_max_size=most)
            await request.read()
        self._busy.add(request.protocol)
        try:
            return await handler(request)
        finally:
            self._busy.discard(request.protocol)
            self._idle_since[request.protocol] = asyncio.get_running_loop().time()

    def _sweep(self) -> None:
        """Close the connections that were idle for too long."""
        loop, server = asyncio.get_running_loop(), self.server
        now, found = loop.time(), server.connections if server is not None else []
        idle = {each: self._idle_since.get(each, now) for each in found if each not in self._busy}
        limit_s = CROWDED_S if len(idle) > MAX_IDLE else IDLE_S
        for connection, since in idle.items():
            if now - since >= limit_s and connection.transport is not None:
                connection.transport.abort()
        self._idle_since = idle
        self._timer = loop.call_later(SWEEP_S, self._sweep)
