"""An OpenAI-style endpoint on loopback with scripted answers and faults."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

from aiohttp import web

from tests.fakes.ports import held_port


class FakeCompletions:
    """Answers "<number of messages>: <the last one>", unless a fault is queued.

    Faults: a status ("500", "429", "401"), "hang", "reset", "redirect", or a body, sent with 200.
    """

    def __init__(self, *faults: str) -> None:
        self.faults = deque(faults)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most = self._now = 0
        """Maximum number of concurrent requests so far."""
        self.on_hang: Callable[[], None] = lambda: None
        """Called when a request starts to hang because of a fault."""
        self.released = asyncio.Event()
        self.released.set()
        self._arrived = asyncio.Condition()

    @property
    def url(self) -> str:
        """The base address."""
        return f"http://127.0.0.1:{self.port}/v1"

    async def received(self, count: int) -> None:
        """Wait until the endpoint has received `count` requests."""
        async with asyncio.timeout(60.0), self._arrived:
            await self._arrived.wait_for(lambda: len(self.bodies) >= count)

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        self._held = ExitStack()
        self.port = self._held.enter_context(held_port())
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        self._held.close()

    async def _answer(self, request: web.Request) -> web.Response:
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            return await self._say(request)
        finally:
            self._now -= 1

    async def _say(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        async with self._arrived:
            self._arrived.notify_all()
        await self.released.wait()
        fault = self.faults.popleft() if self.faults else ""
        if fault == "hang":
            self.on_hang()
            await asyncio.Event().wait()
        if fault == "reset":
            request.transport.abort()
        if fault == "redirect":
            raise web.HTTPTemporaryRedirect("http://127.0.0.1:9/elsewhere")
        if fault.isdigit():
            about = f"told {request.headers.get('Authorization')}"
            headers = {"Retry-After": "0"} if fault == "429" else {}
            return web.json_response(
                {"error": {"message": about}}, status=int(fault), headers=headers
            )
        if fault:
            body = fault.encode(errors="surrogateescape")
            return web.Response(body=body, content_type="application/json")
        text = f"{len(body['messages'])}: {body['messages'][-1]['content']}"
        message = {"role": "assistant", "content": text}
        return web.json_response({"id": "1", "choices": [{"index": 0, "message": message}]})
