"""Scripted weight routes of the fake: sessions, groups and checksums.

The fake joins no torch group and receives no bytes: a distributed update is answered at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tests.fakes.scripted_server import BODY, folder_content

if TYPE_CHECKING:
    from tests.fakes.sglang import FakeSGLang

OUTSIDE = "{} must run between begin_weight_update() and end_weight_update()"
OPEN = "a weight-update session is already open; call end_weight_update() first"
CLOSED = "no weight-update session is open; call begin_weight_update() first"
UNKNOWN = (
    "Failed to receive weights: Group {} not in {}. Please call `init_weights_update_group` first."
)
TAKEN = (
    "Failed to initialize custom process group: The specified group name has already been "
    "created, please use a different group name."
)


class Refused(Exception):
    """Status 400 with this message."""


class WeightRoutes:
    """Handlers of the weight routes, and their state."""

    def __init__(self, fake: FakeSGLang) -> None:
        self.fake = fake
        self.forget()

    def forget(self) -> None:
        """Reset the state, as a restart does."""
        self.session = False
        self.groups: list[str] = []
        self.parts: list[str] = []
        self.content = "start"
        """Identifies the weights; the checksum is computed from it."""

    def handlers(self) -> dict[str, Any]:
        """Return a handler for each path; 404 for routes that the simulated version lacks."""
        fake = self.fake
        always: Callable[[], bool] = lambda: True  # noqa: E731
        sessions: Callable[[], bool] = lambda: fake.sessions  # noqa: E731
        table: dict[str, tuple[Callable[[dict[str, Any]], Awaitable[dict[str, Any]]], Any]] = {
            "/update_weights_from_disk": (self._from_disk, always),
            "/update_weights_from_distributed": (self._from_distributed, always),
            "/begin_weight_update": (self._begin, sessions),
            "/end_weight_update": (self._end, sessions),
            "/init_weights_update_group": (self._init, always),
            "/destroy_weights_update_group": (self._destroy, always),
            "/update_weight_version": (self._relabel, always),
            "/weights_checker": (self._check, lambda: fake.checksum is not None),
        }
        self._exists = {path: exists for path, (_, exists) in table.items()}
        return {path: self._told(path, handler) for path, (handler, _) in table.items()}

    def _told(self, path: str, handler: Any) -> Any:
        async def handle(request: web.Request) -> web.Response:
            if not self._exists[path]():
                raise web.HTTPNotFound
            status, answer = 200, {"success": True, "message": "Success"}
            try:
                answer |= await handler(request[BODY])
            except Refused as refused:
                status, answer = 400, {"success": False, "message": str(refused)}
            return web.json_response(answer, status=status)

        return handle

    def openapi(self, others: list[str]) -> dict[str, Any]:
        """Return the OpenAPI description of the simulated version."""
        paths = others + [path for path, exists in self._exists.items() if exists()]
        text = {"anyOf": [{"type": "string"}, {"type": "null"}]}
        schemas = {
            "PauseGenerationReqInput": {"mode": {"enum": list(self.fake.pause_modes)}},
            "UpdateWeightsFromDistributedReqInput": {"names": {}}
            | ({"load_format": text} if self.fake.buckets else {}),
        }
        return {
            "paths": {path: {"post": {}} for path in paths},
            "components": {"schemas": {n: {"properties": p} for n, p in schemas.items()}},
        }

    async def _from_disk(self, body: dict[str, Any]) -> dict[str, Any]:
        path = body.get("model_path", "")
        if body.get("abort_all_requests"):  # first, as SGLang does
            await self.fake.abort_all()
        content = await asyncio.to_thread(folder_content, path)
        if content is None:
            raise Refused(f"Failed to get weights iterator: {path} is no folder")
        text = await self._change(body, content)
        self.fake.model_path = path
        return {"message": "Succeeded to update model weights." + text, "num_paused_requests": 0}

    async def _from_distributed(self, body: dict[str, Any]) -> dict[str, Any]:
        self._need_session("update_weights_from_distributed")
        name = body.get("group_name", "weight_update_group")
        if name not in self.groups:
            raise Refused(UNKNOWN.format(name, self.groups))
        text = await self._change(body, self._part(sorted(body["names"])))
        return {"message": "Succeeded to update parameter online." + text}

    def _part(self, part: list[Any]) -> str:
        """Return the identity of the weights after another part of this session."""
        self.parts.append(str(part))
        return " ".join(self.parts)

    def _need_session(self, what: str) -> None:
        if self.fake.sessions and not self.session:
            raise Refused(OUTSIDE.format(what))

    async def _change(self, body: dict[str, Any], content: str) -> str:
        if not await self.fake.change(body):
            self.content = content
            raise Refused("Weights were updated, but the cache was not flushed because ….")
        self.content = content
        version = body.get("weight_version")
        return f" Weight version updated to {version}." if version is not None else ""

    async def _begin(self, body: dict[str, Any]) -> dict[str, Any]:
        await self.fake.still()
        if self.session:
            raise Refused(OPEN)
        self.session, self.parts = True, []
        return {}

    async def _end(self, body: dict[str, Any]) -> dict[str, Any]:
        await self.fake.still()
        if not self.session:
            raise Refused(CLOSED)
        self.session = False
        return {}

    async def _init(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["group_name"] in self.groups:
            raise Refused(TAKEN)
        self.groups.append(body["group_name"])
        return {"message": "Succeeded to initialize custom process group."}

    async def _destroy(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["group_name"] not in self.groups:
            raise Refused("The group to be destroyed does not exist.")
        self.groups.remove(body["group_name"])
        return {"message": "Succeeded to destroy custom process group."}

    async def _relabel(self, body: dict[str, Any]) -> dict[str, Any]:
        version = body["new_version"]
        await self.fake.relabel(version, abort=body.get("abort_all_requests", True))
        return {"message": f"Weight version updated to {version}", "new_version": version}

    async def _check(self, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("action", "checksum") != "checksum":
            raise Refused(f"Unsupported action={body['action']!r}")
        told = self.fake.checksum or sha256(self.content.encode()).hexdigest()
        ranks = [{"checksums": {"weights": told}, "per_gpu_checksum": told}]
        return {"message": "Success.", "ranks": ranks, "per_engine_checksum": told}
