"""Small web sites on loopback, and the check whether this machine has a browser."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from arealite.ext.web.config import BrowserConfig

LACKING = [
    name
    for name, there in {
        "Debian's chromium-headless-shell": shutil.which("chromium-headless-shell"),
        "playwright": find_spec("playwright"),
        "miniwob": find_spec("miniwob"),
    }.items()
    if not there
]
needs_chromium = pytest.mark.skipif(bool(LACKING), reason=f"needs {', '.join(LACKING)}")

Answer = str | Callable[[web.Request], Awaitable[web.StreamResponse]]


class Site:
    """Serves pages by path and records the requests."""

    def __init__(self, pages: dict[str, Answer]) -> None:
        self.pages = pages
        self.asked: list[str] = []
        self.address = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path_qs)
        page = self.pages.get(request.path)
        if page is None:
            raise web.HTTPNotFound
        if isinstance(page, str):
            return web.Response(text=page, content_type="text/html")
        return await page(request)


@asynccontextmanager
async def serving(pages: dict[str, Answer]) -> AsyncGenerator[Site, None]:
    """Serve pages until the body exits."""
    site, app = Site(pages), web.Application()
    app.router.add_route("*", "/{path:.*}", site.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    site.address = f"http://{host}:{port}"
    try:
        yield site
    finally:
        await runner.cleanup()


@asynccontextmanager
async def one_task(folder: Path) -> AsyncGenerator[dict[str, Any], None]:
    """Serve a site for WebArena; yield the options of an environment that plays on it."""
    checks = {"eval_types": ["string_match"], "reference_answers": {"exact_match": "blue"}}
    task = {"sites": ["shopping"], "task_id": 0, "start_url": "__SHOPPING__", "intent": "Which?"}
    file = folder / "tasks.json"
    file.write_text(json.dumps([{**task, "eval": checks}]))
    async with serving({"/": "<title>Shop</title><p>blue"}) as site:
        options: dict[str, Any] = {"tasks": str(file), "sites": {"shopping": site.address}}
        yield {**options, "held_out": 0, "max_steps": 2, "browser": BrowserConfig(contexts=4)}
