"""Language-model servers for a command that has no supervisor, for as long as it needs them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from arealite.api.config import ExperimentConfig
from arealite.base.errors import RoleError
from arealite.impl.launcher.local import server_overrides
from arealite.impl.launcher.processes import Child, end_all, server_gpus, spawn


@asynccontextmanager
async def own_servers(config: ExperimentConfig, logs: Path) -> AsyncGenerator[None]:
    """Run `launcher.llm_servers` servers for the body's time; it is cut short when one ends.

    Raises:
        RoleError: one ended, alone or in a group; its own parent could not bring it back.
    """
    children, count = list[Child](), config.launcher.llm_servers
    words = [sys.executable, "-m", "arealite.cli.main", "serve-llm", *server_overrides(config)]
    try:
        async with asyncio.TaskGroup() as watching:
            for index in range(count):
                name, gpus = f"llm_server-{index}", server_gpus(index, count, ranks=0)
                child = await spawn(name, words, log=logs / f"{name}.log", environment=gpus)
                children.append(child)
            watches = [watching.create_task(_until_dead(child)) for child in children]
            yield
            for watch in watches:
                watch.cancel()
    finally:
        await end_all(children)


async def _until_dead(child: Child) -> None:
    await child.process.wait()
    raise RoleError(child.obituary)
