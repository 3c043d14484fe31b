"""Limits of HTTP servers: long bodies, and connections without a request."""

from __future__ import annotations

import asyncio
import io
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from arealite.ext.http_server import http_limits
from arealite.ext.http_server.http_limits import LimitedRunner

HEAD = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n"


class Site:
    """A server whose /wait answers once it is `released`."""

    def __init__(self) -> None:
        self.address = ""
        self.waiting, self.released = asyncio.Event(), asyncio.Event()

    async def echo(self, request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    async def wait(self, request: web.Request) -> web.Response:
        self.waiting.set()
        await self.released.wait()
        return web.Response(text="done")


@pytest.fixture
async def site(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    """Check connections frequently, and close them only if a test shortens the limits."""
    monkeypatch.setattr(http_limits, "SWEEP_S", 0.01)
    monkeypatch.setattr(http_limits, "IDLE_S", 3600.0)
    made, app = Site(), web.Application()
    app.add_routes([web.post("/echo", made.echo), web.post("/wait", made.wait)])
    runner = LimitedRunner(app, bodies={"/echo": 2**20}, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.address = f"127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


@asynccontextmanager
async def connected(site: Site, sent: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """Open a raw connection and send bytes."""
    reader, writer = await asyncio.open_connection(*site.address.split(":"))
    try:
        writer.write(sent)
        await writer.drain()
        yield reader
    finally:
        writer.transport.abort()


async def closed(reader: asyncio.StreamReader) -> bytes:
    """Wait until the server has closed the connection; return what it sent before."""
    async with asyncio.timeout(60):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        (b"", False),
        (b"POST /echo HT", False),
        (HEAD + b"X-Slow: ", False),
        (HEAD + b"\r\nab", False),
        (HEAD + b"\r\nabcd" + b"GET / ", True),
    ],
    ids=["nothing", "request line", "headers", "body", "second request"],
)
async def test_connection_without_a_whole_request_is_closed_and_a_long_answer_is_awaited(
    site: Site, monkeypatch: pytest.MonkeyPatch, sent: bytes, answered: bool
) -> None:
    async with aiohttp.ClientSession(f"http://{site.address}") as session:
        answer = asyncio.ensure_future(session.post("/wait", data=b"x"))
        await site.waiting.wait()
        async with connected(site, sent) as reader:
            if answered:
                await reader.readuntil(b"abcd")
            with monkeypatch.context() as patch:
                patch.setattr(http_limits, "IDLE_S", 0.0)
                await closed(reader)
        site.released.set()
        assert await (await answer).text() == "done"


async def test_idle_connections_are_closed_early_where_there_are_too_many(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_limits, "MAX_IDLE", 1)
    monkeypatch.setattr(http_limits, "CROWDED_S", 0.0)
    async with connected(site, b"") as first, connected(site, b"") as second:
        await asyncio.gather(closed(first), closed(second))


@pytest.mark.parametrize(
    ("path", "size", "status"),
    [
        ("/echo", 2**20, 200),
        ("/echo", 2**20 + 1, 413),
        ("/wait", 2**16 + 1, 413),
        ("/none", 2**16, 404),
        ("/none", 2**16 + 1, 413),
    ],
)
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_body_above_the_limit_of_its_route_is_refused(
    site: Site, path: str, size: int, status: int, is_chunked: bool
) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"x" * size

    body = chunks() if is_chunked else io.BytesIO(b"x" * size)
    async with (
        aiohttp.ClientSession(f"http://{site.address}") as session,
        session.post(path, data=body) as answer,
    ):
        assert answer.status == status
        assert status != 200 or len(await answer.read()) == size


async def test_compressed_body_is_not_decompressed(site: Site) -> None:
    """A small body can become a large one, and aiohttp decompresses it before any check."""
    body, headers = zlib.compress(b"x" * 2**26), {"Content-Encoding": "deflate"}
    async with (
        aiohttp.ClientSession(f"http://{site.address}") as session,
        session.post("/echo", data=body, headers=headers) as answer,
    ):
        assert await answer.read() == body
