"""The live page beside a run: a child process, whose failure does not affect the run."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from arealite.api.config import ExperimentConfig, run_paths
from arealite.impl.launcher.processes import Child, end_all, spawn

END_S = 3.0
"""How long the page may take to send its last state."""


@asynccontextmanager
async def live_page(config: ExperimentConfig, say: Callable[[str], object]) -> AsyncGenerator[None]:
    """Serve the live page during the body if `view.web` is set; pass its address to `say`."""
    children, paths = list[Child](), run_paths(config)
    words = [sys.executable, "-m", "arealite.cli.main", "top", str(paths.root), "--web"]
    words += ["--port", str(config.view.port)]

    async def serve() -> None:
        log = paths.logs / "view.log"
        child = await spawn("view", words, log=log, environment={}, stdout=PIPE)
        children.append(child)
        line = await child.process.stdout.readline() if child.process.stdout else b""
        say(line.decode().strip() or f"no live page: its process exited, see {log}")

    serving = asyncio.ensure_future(serve()) if config.view.web else None
    try:
        yield
    finally:
        if serving:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        await end_all(children, grace_s=END_S)
