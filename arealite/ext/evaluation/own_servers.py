"""LLM servers of a command that samples without a launcher."""

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from arealite.api.experiment_config import ExperimentConfig
from arealite.base.errors import RoleError
from arealite.impl.launcher.processes import Child, end_all, server_gpus, server_overrides, spawn


@asynccontextmanager
async def own_servers(config: ExperimentConfig, logs: Path) -> AsyncGenerator[None]:
    """Run `launcher.llm_servers` servers during the body; cancel the body if a server exits.

    Raises:
        RoleError: a server exited and its parent process could not restart it; alone or in an
            exception group.
    """
    children = list[Child]()
    num_servers = config.launcher.llm_servers
    command = [sys.executable, "-m", "arealite.cli.main", "serve-llm", *server_overrides(config)]
    try:
        async with asyncio.TaskGroup() as watching:
            for index in range(num_servers):
                name = f"llm_server-{index}"
                child = await spawn(
                    name,
                    command,
                    log=logs / f"{name}.log",
                    environment=server_gpus(index, num_servers, ranks=0),
                )
                children.append(child)
            watches = [watching.create_task(_until_dead(child)) for child in children]
            yield
            for watch in watches:
                watch.cancel()
    finally:
        await end_all(children)


async def _until_dead(child: Child) -> None:
    await child.process.wait()
    raise RoleError(child.exit_report)
