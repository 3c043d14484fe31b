"""Requests that a server refuses: of web pages, for other hosts, and without the token."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from arealite.ext.http_server.http_guard import guard


async def answer(request: web.Request) -> web.Response:
    return web.Response(text="in")


async def serve(token: str) -> AsyncIterator[str]:
    app = web.Application(middlewares=[guard(token, "gpu-7.example")])
    app.add_routes([web.route("*", path, answer) for path in ("/health", "/generate")])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.fixture
async def locked() -> AsyncIterator[str]:
    async for url in serve("s3cret"):
        yield url


@pytest.fixture
async def unlocked() -> AsyncIterator[str]:
    async for url in serve(""):
        yield url


async def status(url: str, headers: dict[str, str], method: str = "POST") -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, headers=headers) as response,
    ):
        return response.status


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"Authorization": "Bearer s3cret"}, 200),
        ({}, 401),
        ({"Authorization": "Bearer s3cre"}, 401),
        ({"Authorization": "Bearer s3crets"}, 401),
        ({"Authorization": "Bearer \udcff"}, 401),
        ({"Authorization": "Basic s3cret"}, 401),
        ({"Authorization": "Bearer s3cret", "Origin": "http://evil.example"}, 403),
        ({"Authorization": "Bearer s3cret", "Origin": "null"}, 403),
        ({"Authorization": "Bearer s3cret", "Host": "evil.example"}, 403),
        ({"Authorization": "Bearer s3cret", "Host": ""}, 403),
        ({"Authorization": "Bearer s3cret", "Host": "[::1"}, 403),
        ({"Authorization": "Bearer s3cret", "Host": "GPU-7.example:80"}, 200),
        ({"Authorization": "Bearer s3cret", "Host": "localhost"}, 200),
        ({"Authorization": "Bearer s3cret", "Host": "[::1]:80"}, 200),
        ({"Authorization": "Bearer s3cret", "Host": socket.gethostname()}, 200),
    ],
)
async def test_request_needs_the_token_and_is_of_no_page(
    locked: str, sent: dict[str, str], expected: int
) -> None:
    assert await status(f"{locked}/generate", sent) == expected


async def test_health_needs_no_token(locked: str) -> None:
    assert await status(f"{locked}/health", {}, "GET") == 200


@pytest.mark.parametrize("sent", [{"Origin": "http://a.example"}, {"Host": "a.example"}])
@pytest.mark.parametrize("path", ["health", "generate"])
async def test_pages_are_refused_without_a_token_too(
    unlocked: str, path: str, sent: dict[str, str]
) -> None:
    assert await status(f"{unlocked}/{path}", sent) == 403
    assert await status(f"{unlocked}/{path}", {}) == 200


async def test_refusals_are_logged_once_a_peer(
    locked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        assert await status(f"{locked}/generate", {"Authorization": "Bearer wrong"}) == 401
    said = capsys.readouterr().out
    assert said.count("request refused") == 1 and "wrong" not in said and "s3cret" not in said
