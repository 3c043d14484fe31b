"""Serve a folder of pages to the browser, from memory, on loopback.

With file:// an agent could read this machine's files. Intercepting requests in the browser would
make each load about three times as slow.
"""

from __future__ import annotations

import asyncio
import mimetypes
from pathlib import Path

from aiohttp import web

HEADERS = {"Cache-Control": "max-age=86400"}


class FileServer:
    """Answers GET requests with the files below `root`, and all other requests with 404."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.address = ""
        """`http://127.0.0.1:port`, set by `setup`."""
        self._files: dict[str, tuple[bytes, str]] = {}
        self._runner: web.AppRunner | None = None

    async def setup(self) -> None:
        """Listen on a free port."""
        app = web.Application()
        app.router.add_get("/{path:.*}", self._get)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.address = f"http://{host}:{port}"

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _get(self, request: web.Request) -> web.Response:
        path = request.match_info["path"]
        if path not in self._files:
            file = (self.root / path.replace("\0", "")).resolve()
            if not file.is_relative_to(self.root) or not file.is_file():
                raise web.HTTPNotFound
            kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
            self._files[path] = await asyncio.to_thread(file.read_bytes), kind
        body, kind = self._files[path]
        charset = "utf-8" if kind.startswith("text/") else None
        return web.Response(body=body, content_type=kind, charset=charset, headers=HEADERS)
