"""The part of SGLang's HTTP API that a server's name entry is made from."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, NoReturn

import msgspec

FOLLOW_S = 0.2
"""Pause between two questions for the version: so late, clients learn of new weights."""


class ModelInfo(msgspec.Struct):
    """The part of /model_info that a name says."""

    weight_version: str | int | None = None


class Model(msgspec.Struct):
    """An item of /v1/models."""

    max_model_len: int | None = None


class Models(msgspec.Struct):
    """The part of /v1/models that a name says."""

    data: Annotated[list[Model], msgspec.Meta(min_length=1)]


class ServerInfo(msgspec.Struct):
    """The part of /server_info that a name says."""

    max_req_input_len: int | None = None


class Load(msgspec.Struct):
    """Requests of one copy of the model."""

    num_running_reqs: int
    num_waiting_reqs: int
    max_running_requests: int = 0
    """0: it does not tell."""


class Loads(msgspec.Struct):
    """The part of /v1/loads that a name says."""

    loads: list[Load]

    def total(self) -> dict[str, int]:
        """Return the requests of all copies of the model, and how many can run at a time."""
        return {
            "running": sum(load.num_running_reqs for load in self.loads),
            "waiting": sum(load.num_waiting_reqs for load in self.loads),
            "capacity": sum(load.max_running_requests for load in self.loads),
        }


def note_load(entry: dict[str, Any], loads: Loads | None) -> None:
    """Write the load into a server's name entry; None: the server does not tell."""
    entry.pop("load", None)
    if loads is not None:
        entry["load"] = loads.total()


async def follow(
    entry: dict[str, Any],
    changed: asyncio.Event,
    *,
    version: Callable[[], Awaitable[str | int | None]],
    load: Callable[[], Awaitable[Loads | None]],
    heartbeat_s: float,
) -> NoReturn:
    """Keep the version and the load in a server's name entry fresh, until `version` raises.

    Args:
        entry: The value of the name.
        changed: Is set when the version has changed, so that the name is written at once.
        version: Asks the server for the version of its weights.
        load: Asks the server for its load; None: it does not tell. Apart from `version`, because
            SGLang's scheduler answers nothing while it loads weights.
        heartbeat_s: Seconds between two questions for the load.
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
