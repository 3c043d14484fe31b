"""What a client says of a server that it leaves."""

from __future__ import annotations

from pathlib import Path

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer
from structlog.testing import capture_logs

from arealite.impl.client.directory import Directory
from arealite.impl.client.routing import Router, Server
from arealite.system.names.registry import NameRegistry


async def test_token_stays_out_of_the_log_when_a_server_answers_with_errors(tmp_path: Path) -> None:
    async def refuse(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer s3cret-token"
        return web.Response(status=503)

    app = web.Application()
    app.router.add_get("/model_info", refuse)
    headers = {"Authorization": "Bearer s3cret-token"}
    directory = Directory(Router(), NameRegistry(tmp_path), refresh_s=600.0, timeout_s=60.0)
    async with TestServer(app) as host, aiohttp.ClientSession(headers=headers) as session:
        await directory.start(session)
        with capture_logs() as events:
            server = Server("a", str(host.make_url("")).rstrip("/"), alive=True)
            await directory._ask(server, is_named=True)
        await directory.close()
    (event,) = events
    assert not server.alive and "503" in event["error"] and "s3cret" not in str(events)
