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
from typing import Any

import msgspec
from aiohttp import web

from arealite.base.errors import UserError
from arealite.base.trial_files import RunPaths
from arealite.ext.http_server.http_guard import guard
from arealite.ext.http_server.http_limits import LimitedRunner
from arealite.ext.view import report, report_rows, report_run
from arealite.ext.view.panel import health, progress
from arealite.ext.view.report_text import Vocabulary
from arealite.ext.view.snapshot import RunReader, Snapshot

MAX_TRAJECTORIES = 10_000
"""Maximum number of trajectories on the page."""
PERIOD_S = 2.0
"""Shortest time between two reads of the run's data."""
READ_SHARE = 0.05
"""Largest share of the time in which the run's data are read."""
BLOCK_KINDS = "txrw"
"""First letters of a chunk's blocks: those of a report's file, and its words."""
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
        self._read_state: tuple[object, ...] = ()
        """Newest step, number of evaluations and state at the last successful read."""
        self._due_s = 0.0
        self._problem = ""
        self._version = ""
        self._report = dict[str, Any]()
        self._chunks = list[list[report_rows.TrajectoryRow]]()
        self._blocks = lru_cache(maxsize=4)(self._read_chunk)

    def answer(self, name: str, version: str) -> bytes:
        """Return the answer to a request of the page.

        Args:
            name: "": the page itself; "run": the run's state, and its data if they are newer; else
                a block of tokens as in a report's file, or of words: w3 has those of t3.
            version: The version of the page's data; "": none. Blocks of an older version are empty.
        """
        if name == "":
            title = report_run.run_name(self._paths)
            html = report.page(title, {"live": True}, connects="'self'")
            return html.encode()
        if name == "run":
            return self._answer_run(version)
        if version != self._version:
            return b""
        kind = name[0]
        number = int(name[1:])
        blocks = self._blocks(version, number)
        return blocks[BLOCK_KINDS.index(kind)]

    def _answer_run(self, version: str) -> bytes:
        """Return the run's state, and its data if they are newer than `version`."""
        shot = self._reader.read()
        state = self._state(shot)
        self._renew(shot)
        newer_report = self._report if version != self._version else None
        return msgspec.json.encode(
            {"state": state, "version": self._version, "about": newer_report},
        )

    def _renew(self, shot: Snapshot) -> None:
        """Read the run's data if there is a new step. Before step 1, the data are small."""
        began = time.monotonic()
        if began < self._due_s:
            return
        metrics = shot.metrics
        state = (metrics.newest, len(metrics.evals), shot.state)
        if metrics.steps and state == self._read_state:
            return
        try:
            rows, self._report = report.read(self._paths, most=MAX_TRAJECTORIES)
            self._chunks = [*report_rows.cut(rows)]
            self._version = str(self._report["written"])
            self._read_state = state
            self._problem = ""
        except (UserError, OSError, sqlite3.Error) as error:  # for example while it is created
            self._problem = str(error)
        ended = time.monotonic()
        pause_s = (ended - began) / READ_SHARE
        self._due_s = ended + max(PERIOD_S, pause_s)

    def _read_chunk(self, version: str, number: int) -> tuple[bytes, ...]:
        """Return the blocks of a chunk, in the order of BLOCK_KINDS."""
        chunks = report_rows.Chunks(self._paths)
        token_blocks = chunks.pack(self._chunks[number])
        words = report.words(chunks, self._vocabulary)
        return *token_blocks, msgspec.json.encode(words)

    def _state(self, shot: Snapshot) -> list[tuple[str, str]]:
        """Return labels and texts on the state of the run."""
        rows = [next(progress(shot)), *health(shot)]
        state = [
            ("", shot.state),
            ("cannot be read", self._problem),
            *((row.label, row.line.plain) for row in rows),
            ("now", shot.now),
        ]
        return [(label, line) for label, line in state if line]


async def serve(paths: RunPaths, port: int, say: Callable[[str], object]) -> None:
    """Serve the page until the task is cancelled; pass its address with its token to `say`.

    Raises:
        UserError: the folder is no run folder, or the port is in use.
    """
    loop = asyncio.get_running_loop()
    thread = ThreadPoolExecutor(1)
    token = secrets.token_hex(16)
    run = await loop.run_in_executor(thread, LiveRun, paths)

    async def answer(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        version = request.query.get("version", "")
        body = await loop.run_in_executor(thread, run.answer, name, version)
        return web.Response(
            body=body,
            content_type="application/octet-stream" if name else "text/html",
            charset="utf-8",
            headers=HEADERS,
        )

    only_with_token = guard(token, is_page=True)
    app = web.Application(middlewares=[only_with_token])
    app.router.add_get(r"/{name:|run|[trwx]\d{1,9}}", answer)
    runner = LimitedRunner(app, bodies={}, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        _, actual_port = runner.addresses[0]
        say(f"live page: http://127.0.0.1:{actual_port}/?token={token}")
        await asyncio.Event().wait()
    except (OSError, OverflowError) as error:
        reason = str(error).rstrip(".")
        raise UserError(
            f"--port {port}: {reason}. Use another port, or 0 for a free one.",
        ) from error
    finally:
        await runner.cleanup()
