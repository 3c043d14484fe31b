"""Serves the report's page of a run on loopback; the page shows new steps without a reload.

The page asks for the run's state again and again, and receives the report's data after each step.
Tokens of trajectories are read when the page shows them.
"""

import asyncio
import secrets
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import msgspec
from aiohttp import web

from arealite.base.errors import UserError
from arealite.base.names import RunPaths
from arealite.impl.http_guard import guard
from arealite.impl.http_limits import LimitedRunner
from arealite.impl.view import report, report_rows
from arealite.impl.view.panel import health, progress
from arealite.impl.view.report_text import Vocabulary
from arealite.system.health.snapshot import RunReader, Snapshot

MOST = 10_000
"""Maximum number of trajectories on the page."""
PERIOD_S, SHARE = 2.0, 0.05
"""Shortest time between two reads of the run's data, and their largest share of the time."""
HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}


class LiveRun:
    """The data of a run's page. All methods read files; one thread calls them."""

    def __init__(self, paths: RunPaths) -> None:
        """Read the config.

        Raises:
            UserError: the folder is no run folder.
        """
        self._paths = paths
        self._reader = RunReader(paths)
        self._vocabulary = Vocabulary.find(report.model_folders(paths))
        self._seen = object()
        self._due = 0.0
        self._problem = ""
        self._version = ""
        self._about = {}
        self._chunks = list[list[report_rows.Row]]()
        self._pack = lru_cache(maxsize=4)(self._read_chunk)

    def answer(self, name: str, version: str) -> bytes:
        """Return the answer to a request of the page.

        Args:
            name: "": the page itself; "run": the run's state, and its data if they are newer; else
                a block of tokens as in a report's file, or of words: w3 has those of t3.
            version: The version of the page's data; "": none. Blocks of an older version are empty.
        """
        if name == "":
            title = "/".join(self._paths.root.absolute().parts[-2:])
            return report.page(title, {"live": True}, connects="'self'").encode()
        if name == "run":
            state = self._state(shot := self._reader.read())
            self._renew(shot)
            about = self._about if version != self._version else None
            return msgspec.json.encode({"state": state, "version": self._version, "about": about})
        if version != self._version:
            return b""
        return self._pack(version, int(name[1:]))["txrw".index(name[0])]

    def _renew(self, shot: Snapshot) -> None:
        """Read the run's data if there is a new step. Before step 1, the data are small."""
        began = time.monotonic()
        seen = (shot.metrics.newest, len(shot.metrics.evals), shot.state)
        if began < self._due or (seen == self._seen and shot.metrics.steps):
            return
        try:
            rows, self._about = report.read(self._paths, most=MOST)
            self._chunks = [*report_rows.cut(rows)]
            self._version = str(self._about["written"])
            self._seen = seen
            self._problem = ""
        except (UserError, OSError, sqlite3.Error) as error:  # for example while it is created
            self._problem = str(error)
        now = time.monotonic()
        self._due = now + max(PERIOD_S, (now - began) / SHARE)

    def _read_chunk(self, version: str, number: int) -> tuple[bytes, ...]:
        chunks = report_rows.Chunks(self._paths)
        packed = chunks.pack(self._chunks[number])
        return *packed, msgspec.json.encode(report.words(chunks, self._vocabulary))

    def _state(self, shot: Snapshot) -> list[tuple[str, str]]:
        """Return labels and texts on the state of the run."""
        rows = [("", shot.state), ("cannot be read", self._problem)]
        rows += [(label, text.plain) for _, label, text in (next(progress(shot)), *health(shot))]
        return [(label, text) for label, text in [*rows, ("now", shot.now)] if text]


async def serve(paths: RunPaths, port: int, say: Callable[[str], object]) -> None:
    """Serve the page until the task is cancelled; pass its address with its token to `say`.

    Raises:
        UserError: the folder is no run folder, or the port is in use.
    """
    loop, thread, token = asyncio.get_running_loop(), ThreadPoolExecutor(1), secrets.token_hex(16)
    run = await loop.run_in_executor(thread, LiveRun, paths)

    async def answer(request: web.Request) -> web.Response:
        name, version = request.match_info["name"], request.query.get("version", "")
        body = await loop.run_in_executor(thread, run.answer, name, version)
        kind = "application/octet-stream" if name else "text/html"
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)

    app = web.Application(middlewares=[guard(token, is_page=True)])
    app.router.add_get(r"/{name:|run|[trwx]\d{1,9}}", answer)
    runner = LimitedRunner(app, bodies={}, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        say(f"live page: http://127.0.0.1:{runner.addresses[0][1]}/?token={token}")
        await asyncio.Event().wait()
    except (OSError, OverflowError) as error:
        why = str(error).rstrip(".")
        raise UserError(f"--port {port}: {why}. Use another port, or 0 for a free one.") from error
    finally:
        await runner.cleanup()
