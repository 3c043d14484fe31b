"""LLM servers of a command that samples without a launcher."""

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from arealite.base.errors import RoleError
from arealite.impl.launcher.processes import Child, end_all, server_gpus, spawn


@asynccontextmanager
async def own_servers(num_servers: int, file: Path, *, ranks: int = 0) -> AsyncGenerator[None]:
    """Run servers during the body; cancel the body if a server exits.

    Args:
        num_servers: Their number.
        file: Their resolved config. Their logs are in its folder.
        ranks: Number of trainer ranks, which have the first GPUs of this host.

    Raises:
        RoleError: a server exited and its parent process could not restart it; alone or in an
            exception group.
    """
    children = list[Child]()
    command = [sys.executable, "-m", "arealite.cli.main", "serve-llm", str(file)]
    try:
        async with asyncio.TaskGroup() as watching:
            for index in range(num_servers):
                name = f"llm_server-{index}"
                child = await spawn(
                    name,
                    command,
                    log=file.with_name(f"{name}.log"),
                    environment=server_gpus(index, num_servers, ranks=ranks),
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
