"""Limits of an HTTP server before a handler runs: body sizes and idle connections.

Without them, a client that sends its headers or its body slowly holds a connection for ever.
"""

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

IDLE_S = 60.0
"""A connection is closed after this long without a complete request, counted from its beginning or
from the last answer. The answer itself may take any time."""
MAX_IDLE = 512
"""With more idle connections, they are closed after CROWDED_S."""
CROWDED_S = 5.0
"""Rollout workers close their unused connections earlier."""
SWEEP_S = 1.0
"""Seconds between two checks of all connections."""
MAX_BODY = 2**16
"""Bytes of a body, unless its route has another limit."""


class LimitedRunner(web.AppRunner):
    """Runs an application within these limits; it reads the body before it calls the handler."""

    def __init__(self, app: web.Application, *, bodies: Mapping[str, int], **options: Any) -> None:
        """Initialize the runner.

        Args:
            app: The application.
            bodies: Largest body in bytes, by path; MAX_BODY for other paths.
            options: Further options of aiohttp's runner.
        """
        # aiohttp would decompress bodies before any check, in the event loop.
        options["auto_decompress"] = False
        options["access_log"] = None
        options["handler_cancellation"] = True
        super().__init__(app, **options)
        app.middlewares.append(self._serve)
        self._bodies = bodies
        self._idle_since = dict[object, float]()
        """When each connection began or was last answered; infinity during an answer."""

    async def setup(self) -> None:
        await super().setup()
        self._sweep()

    @web.middleware
    async def _serve(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Read the body, then answer; the connection is not idle during the answer."""
        if request.method == "POST":
            limit = self._bodies.get(request.path, MAX_BODY)
            if request.client_max_size != limit:
                request = request.clone(client_max_size=limit)
            await request.read()
        self._idle_since[request.protocol] = math.inf
        try:
            return await handler(request)
        finally:
            self._idle_since[request.protocol] = asyncio.get_running_loop().time()

    def _sweep(self) -> None:
        """Close connections that were idle for too long, every SWEEP_S."""
        if self.server is None:  # after `cleanup`
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        idle_s_of_connection = dict[Any, float]()
        idle_since = dict[object, float]()
        for connection in self.server.connections:
            since = self._idle_since.get(connection, now)
            idle_since[connection] = since
            if since <= now:
                idle_s_of_connection[connection] = now - since
        self._idle_since = idle_since
        limit_s = CROWDED_S if len(idle_s_of_connection) > MAX_IDLE else IDLE_S
        for connection, idle_s in idle_s_of_connection.items():
            if idle_s >= limit_s and connection.transport is not None:
                connection.transport.abort()
        loop.call_later(SWEEP_S, self._sweep)
