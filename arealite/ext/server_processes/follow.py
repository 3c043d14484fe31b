"""Keeps version and load in the entry of a server up to date."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn

from arealite.api.server_protocol import Load

FOLLOW_S = 0.2
"""Seconds between two requests for the version: the delay until clients can read a new version."""


async def follow(
    entry: dict[str, object],
    changed: asyncio.Event,
    version: Callable[[], Awaitable[str | int | None]],
    load: Callable[[], Awaitable[Load | None]],
    *,
    heartbeat_s: float,
) -> NoReturn:
    """Update the version and the load in the content of a server's name, until `version` raises.

    Two tasks poll, because a server may not report its load while it loads weights.

    Args:
        entry: The content of the name.
        changed: It is set when the version has changed, so that the name is written at once.
        version: Requests the version of the server's weights.
        load: Requests the server's load; None: unknown.
        heartbeat_s: Seconds between two requests for the load.
    """

    async def follow_load() -> None:
        while True:
            entry["load"] = await load()
            await asyncio.sleep(heartbeat_s)

    load_task = asyncio.create_task(follow_load(), name="load of a server")
    try:
        while True:
            new_version = await version()
            if new_version != entry["version"]:
                entry["version"] = new_version
                changed.set()
            await asyncio.sleep(FOLLOW_S)
    finally:
        load_task.cancel()
        await asyncio.gather(load_task, return_exceptions=True)
