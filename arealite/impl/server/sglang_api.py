"""The part of SGLang's HTTP API that provides the content of a server's name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, NoReturn

import msgspec

FOLLOW_S = 0.2
"""Seconds between two requests for the version: the delay until clients can read a new version."""


class ModelInfo(msgspec.Struct):
    """Fields of /model_info that a name contains."""

    weight_version: str | int | None = None


class Model(msgspec.Struct):
    """An item of /v1/models."""

    max_model_len: int | None = None


class Models(msgspec.Struct):
    """Fields of /v1/models that a name contains."""

    data: Annotated[list[Model], msgspec.Meta(min_length=1)]


class ServerInfo(msgspec.Struct):
    """Fields of /server_info that a name contains."""

    max_req_input_len: int | None = None


class Load(msgspec.Struct):
    """Requests of one copy of the model."""

    num_running_reqs: int
    num_waiting_reqs: int
    max_running_requests: int = 0
    """0: unknown."""


class Loads(msgspec.Struct):
    """Fields of /v1/loads that a name contains."""

    loads: list[Load]

    def total(self) -> dict[str, int]:
        """Return the running and waiting requests of all copies of the model, and the capacity."""
        return {
            "running": sum(load.num_running_reqs for load in self.loads),
            "waiting": sum(load.num_waiting_reqs for load in self.loads),
            "capacity": sum(load.max_running_requests for load in self.loads),
        }


def note_load(entry: dict[str, object], loads: Loads | None) -> None:
    """Write the load into the content of a server's name; None: the load is unknown."""
    entry.pop("load", None)
    if loads is not None:
        entry["load"] = loads.total()


async def follow(
    entry: dict[str, object],
    changed: asyncio.Event,
    version: Callable[[], Awaitable[str | int | None]],
    load: Callable[[], Awaitable[Loads | None]],
    *,
    heartbeat_s: float,
) -> NoReturn:
    """Update the version and the load in the content of a server's name, until `version` raises.

    Two tasks poll, because SGLang does not reply to requests for its load while it loads weights.

    Args:
        entry: The content of the name.
        changed: It is set when the version has changed, so that the name is written at once.
        version: Requests the version of the server's weights.
        load: Requests the server's load; None: unknown.
        heartbeat_s: Seconds between two requests for the load.
    """

    async def follow_load() -> None:
        while True:
            note_load(entry, await load())
            await asyncio.sleep(heartbeat_s)

    following = asyncio.create_task(follow_load(), name="load of a server")
    try:
        while True:
            if (now := await version()) != entry["version"]:
                entry["version"] = now
                changed.set()
            await asyncio.sleep(FOLLOW_S)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
