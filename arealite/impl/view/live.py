"""Serves the report's page of a run on loopback; the page shows new steps without a reload.

The page always has a request for the run's state open, and receives the report's data again after
each step. Tokens of trajectories are read when the page shows them.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, lru_cache

import msgspec
from aiohttp import web

from arealite.base.errors import UserError
from arealite.base.names import RunPaths
from arealite.base.signals import STOP
from arealite.impl.http_guard import guard
from arealite.impl.http_limits import LimitedRunner
from arealite.impl.view import report, report_rows
from arealite.impl.view.panel import health, progress
from arealite.impl.view.report_text import Vocabulary
from arealite.system.health.snapshot import RunReader, Snapshot

PERIOD_S, SHARE = 2.0, 0.05
"""Seconds between two answers about the run, and the largest share of the time for reading it."""
MOST = 10_000
"""Maximum number of trajectories on the page."""
END_S = 2.0
"""How long the last answers may take after the server is stopped."""
HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}


class LiveRun:
    """The data of a run's page. All methods read files; one thread calls them."""

    def __init__(self, paths: RunPaths) -> None:
        """Read the config.

        Raises:
            UserError: the folder is no run folder.
        """
        self._paths, self._reader = paths, RunReader(paths)
        self._seen, self._due, self._problem = object(), 0.0, ""
        self._version, self._about, self._chunks = "", {}, list[list[report_rows.Row]]()
        self._pack = lru_cache(maxsize=4)(self._read_chunk)

    def answer(self, name: str, version: str, *, is_last: bool = False) -> bytes:
        """Return the answer to a request of the page.

        Args:
            name: "": the page itself; run: the state and, if they changed, the data; else a block
                of tokens as in a report's file, or of words: w3 has the words of t3.
            version: The version of the page's data; "": none.
            is_last: Whether changed data are read even if reading takes more than SHARE.

        Raises:
            LookupError: the block belongs to other data.
        """
        if name == "":
            title = "/".join(self._paths.root.absolute().parts[-2:])
            page = report.page(title, {"name": title, "live": True}, connects="'self'")
            return f"{page}</body></html>\n".encode()
        if name != "run":
            if version != self._version:
                raise LookupError(version)
            return self._pack(version, int(name[1:]))["txw".index(name[0])]
        shot = self._reader.read()
        self._renew(shot, is_last)
        about = self._about if version != self._version else None
        state = {"state": self._state(shot), "version": self._version, "about": about}
        return msgspec.json.encode(state)

    def _renew(self, shot: Snapshot, is_last: bool) -> None:
        """Read the run's data if there is a new step; before step 1, if the ledger changed."""
        began, metrics, ledger = time.monotonic(), shot.metrics, self._paths.ledger
        files = [] if metrics.steps else [ledger, ledger.with_name(f"{ledger.name}-wal")]
        times = [os.path.getmtime(file) for file in files if file.exists()]
        seen = times, metrics.newest, len(metrics.evals), shot.state
        if seen == self._seen or (began < self._due and not is_last):
            return
        try:
            rows, self._about = report.read(self._paths, most=MOST)
            self._chunks, self._version = [*report_rows.cut(rows)], str(self._about["written"])
            self._seen, self._problem = seen, ""
        except (UserError, OSError, sqlite3.Error) as error:  # for example while it is created
            self._problem = str(error)
        self._due = time.monotonic() + (time.monotonic() - began) / SHARE

    def _read_chunk(self, version: str, number: int) -> tuple[bytes, bytes, bytes]:
        chunks = report_rows.Chunks(self._paths)
        packed = chunks.pack(self._chunks[number])
        return *packed, msgspec.json.encode(report.words(chunks, self._vocabulary))

    @cached_property
    def _vocabulary(self) -> Vocabulary | None:
        return Vocabulary.find(report.model_folders(self._paths))

    def _state(self, shot: Snapshot) -> list[tuple[str, str]]:
        """Return labels and texts on the state of the run."""
        rows = [*[*progress(shot)][: 1 if shot.metrics.steps else None], *health(shot)]
        found = [("", shot.state), *((label, text.plain) for _, label, text in rows if text.plain)]
        if shot.state == "running" and not shot.metrics.steps:
            waits = [f"{role}: {what}" for role, what in shot.waits if role.startswith("trainer")]
            found.append(("waits for step 1", "; ".join(waits[:2]) or "the trainer starts"))
        return [*found, ("cannot be read", self._problem)] if self._problem else found


async def serve(paths: RunPaths, port: int, say: Callable[[str], object]) -> None:
    """Serve the page until SIGINT or SIGTERM; pass its address with its token to `say`.

    Raises:
        UserError: the folder is no run folder, or the port is in use.
    """
    run, token = LiveRun(paths), secrets.token_urlsafe(24)
    loop, thread, stopped = asyncio.get_running_loop(), ThreadPoolExecutor(1), asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        name, version = request.match_info["name"], request.query.get("version", "")
        if name == "run" and version:
            with suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), PERIOD_S)
        try:
            body = await loop.run_in_executor(
                thread, lambda: run.answer(name, version, is_last=stopped.is_set())
            )
        except LookupError:
            raise web.HTTPGone(text="the data of the page are old") from None
        kind = "application/octet-stream" if name else "text/html"
        response = web.Response(body=body, content_type=kind, headers=HEADERS)
        response.enable_compression()
        return response

    app = web.Application(middlewares=[guard(token, is_page=True)])
    app.router.add_get(r"/{name:|run|[txw]\d{1,9}}", answer)
    runner = LimitedRunner(app, bodies={}, shutdown_timeout=END_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        for number in (STOP, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        say(f"live page: http://127.0.0.1:{runner.addresses[0][1]}/?token={token}")
        await stopped.wait()
    except OSError as error:
        why = f"cannot listen on 127.0.0.1:{port}: {os.strerror(error.errno or 0)}"
        raise UserError(f"--port {port}: {why}. Use another port, or 0 for a free one.") from error
    finally:
        await runner.cleanup()
