"""Serve a folder of pages to the browser on loopback.

With file:// an agent could read this machine's files. Intercepting requests in the browser would
make each load about three times as slow.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web


@asynccontextmanager
async def serve_folder(root: Path) -> AsyncGenerator[str]:
    """Answer GET requests with the files below `root` until the body exits.

    Yields:
        The address, as `http://127.0.0.1:port`.
    """
    app = web.Application()
    app.router.add_static("/", root)
    app.on_response_prepare.append(_add_headers)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    """Let the browser keep files, and read texts as UTF-8."""
    response.headers["Cache-Control"] = "max-age=86400"
    if response.content_type.startswith("text/"):
        response.charset = "utf-8"
