"""Reads what a server says of itself; keeps versions and load in its entry up to date."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NoReturn

import msgspec

from arealite.api.server_protocol import (
    MARK,
    Json,
    Load,
    ServerDescription,
    ServerProtocol,
    version_text,
)

FOLLOW_S = 0.2
"""Seconds between two requests for the version: the delay until clients can read a new version."""
MODELS_PATH = "/v1/models"
"""Route of SGLang and vLLM whose answer lists the loaded adapters."""


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


def loaded_names(raw: bytes | None) -> list[str]:
    """Return the names in an answer of MODELS_PATH: the model's, and those of adapters."""
    models: list[Json] = json_object(raw).get("data") or []
    return [str(model.get("id")) for model in models]


def adapter_labels(raw: bytes | None) -> dict[str, str] | None:
    """Return the newest label of each adapter that has a name for each version.

    Args:
        raw: The answer of MODELS_PATH; None: no answer.

    Returns:
        As in {"up": "up@3"}; None without an answer.
    """
    if raw is None:
        return None
    labels = dict[str, str]()
    names = [name for name in loaded_names(raw) if version_text(name).isdigit()]
    for name in sorted(names, key=lambda name: int(version_text(name))):
        adapter, mark, _ = name.rpartition(MARK)
        if mark:
            labels[adapter] = name
    return labels


async def follow(
    entry: dict[str, object],
    changed: asyncio.Event,
    version: Callable[[], Awaitable[str | int | None]],
    adapters: Callable[[], Awaitable[dict[str, str] | None]],
    load: Callable[[], Awaitable[Load | None]],
    *,
    heartbeat_s: float,
) -> NoReturn:
    """Update versions and load in the content of a server's name, until `version` raises.

    Two tasks poll, because a server may not report its load while it loads weights.

    Args:
        entry: The content of the name.
        changed: It is set when a version has changed, so that the name is written at once.
        version: Requests the version of the server's weights.
        adapters: Requests the labels of its adapters, if it takes adapters; None: unknown.
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
            versions: dict[str, object] = {"version": await version()}
            if "adapters" in entry:
                labels = await adapters()
                versions["adapters"] = entry["adapters"] if labels is None else labels
            if any(entry[key] != versions[key] for key in versions):
                entry.update(versions)
                changed.set()
            await asyncio.sleep(FOLLOW_S)
    finally:
        load_task.cancel()
        await asyncio.gather(load_task, return_exceptions=True)
