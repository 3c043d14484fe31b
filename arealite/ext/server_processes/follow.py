"""Reads what a server says of itself; keeps version and load in its entry up to date."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NoReturn

import msgspec

from arealite.api.server_protocol import Json, Load, ServerDescription, ServerProtocol

FOLLOW_S = 0.2
"""Seconds between two requests for the version: the delay until clients can read a new version."""


def json_object(raw: bytes | None) -> Json:
    """Return a JSON object; {} if there is none."""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(raw or b"{}", type=Json)
    return {}


async def describe(
    protocol: ServerProtocol, get: Callable[[str], Awaitable[Json]]
) -> ServerDescription | None:
    """Return what a server says of itself; None if it is of another kind.

    Args:
        protocol: Protocol of the kind.
        get: Requests a route; returns its JSON, or {} without an answer.

    Raises:
        UserError: The server cannot be used.
    """
    answers: dict[str, Json] = {}
    for path in protocol.describe_paths:
        answers[path] = await get(path)
        if not any(answers.values()):
            return None  # the first route tells the kinds apart
    return protocol.describe(answers)


def adapters_entry(description: ServerDescription) -> dict[str, object]:
    """Return the part of a server's entry that tells a publisher that it takes adapters."""
    return {"adapters": {}} if description.serves_adapters else {}


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
