"""The routes that bring new weights: a folder or a process group.

In SGLang's protocol, so that a publisher cannot tell the servers apart; but every name and shape is
checked before the first byte is written, and bytes are awaited while generation goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from arealite.base import log
from arealite.impl.server import protocol
from arealite.impl.server.engine import Engine
from arealite.impl.server.group_member import GroupMember
from arealite.impl.server.protocol import Refusal, ServedModel, Update
from arealite.impl.server.replies import as_json
from arealite.impl.server.weights import (
    check_layout,
    checksums,
    stage_tensors,
    stage_weights,
)
from arealite.impl.weights.buckets import Layout

logger = log.get(__name__)

NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or "
    "queued. Retract or finish them, then call /flush_cache."
)
OUTSIDE = (
    "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
)
NAME_TAKEN = "The specified group name has already been created, please use a different group name."


class UpdateRoutes:
    """Their handlers, the open session and the groups."""

    def __init__(self, engine: Engine, model: ServedModel) -> None:
        self.engine = engine
        self.model = model
        self.tensors = engine.decoder.model.state_dict(keep_vars=True)
        self._open = False
        self._groups: dict[str, GroupMember] = {}
        self._writing = asyncio.Lock()
        """Held while weights change, and while they are summed up."""

    def routes(self) -> list[web.RouteDef]:
        """Return the routes; every refusal among them has the form {"success", "message"}."""
        handlers = {
            "/update_weights_from_disk": self._from_disk,
            "/update_weights_from_distributed": self._from_distributed,
            "/begin_weight_update": self._begin,
            "/end_weight_update": self._end,
            "/init_weights_update_group": self._init_group,
            "/destroy_weights_update_group": self._destroy_group,
            "/update_weight_version": self._relabel,
            "/weights_checker": self._check,
        }
        return [web.post(path, _told(handler)) for path, handler in handlers.items()]

    async def close(self, app: web.Application) -> None:
        """Leave the groups, without waiting for what blocks."""
        for member in self._groups.values():
            member.leave()

    async def _from_disk(self, raw: bytes) -> dict[str, Any]:
        body = protocol.parse(raw, protocol.UpdateWeightFromDiskReqInput)
        if body.load_format not in (None, "auto", "safetensors"):
            raise Refusal(f"load_format must be auto or safetensors, got {body.load_format!r}.")
        path = body.model_path
        told = await self._update(body, lambda: stage_weights(self.tensors, path))
        self.model.weights = path
        logger.info("weights updated", version=self.engine.version, path=path)
        return _done("Succeeded to update model weights." + told) | {"num_paused_requests": 0}

    async def _from_distributed(self, raw: bytes) -> dict[str, Any]:
        body = protocol.parse(raw, protocol.UpdateWeightsFromDistributedReqInput)
        if not self._open:
            raise Refusal(OUTSIDE)
        layout = Layout(body.names, body.dtypes, body.shapes)
        member = self._groups.get(body.group_name)
        if member is None:
            raise Refusal(
                f"Failed to receive weights: Group {body.group_name} not in "
                f"{list(self._groups)}. Please call `init_weights_update_group` first."
            )
        check_layout(self.tensors, layout)
        flat = body.load_format == "flattened_bucket"
        try:
            named = await member.receive(layout, flat=flat)
        except (RuntimeError, OSError) as error:
            raise Refusal(f"Failed to receive weights: {error}") from error
        told = await self._update(body, lambda: stage_tensors(self.tensors, named))
        return _done("Succeeded to update parameter online." + told)

    async def _update(self, body: Update, stage: Callable[[], Callable[[], None]]) -> str:
        """Change the weights when nothing runs; return what is to be told of the version."""
        if body.abort_all_requests:
            self.engine.abort(lambda generation: True)
        version = body.weight_version
        async with self._writing:
            update = self.engine.update(stage, version=version, flush=body.flush_cache)
            clean = await asyncio.wrap_future(update)
        if not clean:
            raise Refusal(NOT_FLUSHED)
        if version is None:
            return ""
        self.model.version = version
        return f" Weight version updated to {version}."

    async def _begin(self, raw: bytes) -> dict[str, Any]:
        await asyncio.wrap_future(self.engine.when_still(lambda: None))
        if self._open:
            raise Refusal("a weight-update session is already open; call end_weight_update() first")
        self._open = True
        return _done("Success")

    async def _end(self, raw: bytes) -> dict[str, Any]:
        await asyncio.wrap_future(self.engine.when_still(lambda: None))
        if not self._open:
            raise Refusal("no weight-update session is open; call begin_weight_update() first")
        self._open = False
        return _done("Success")

    async def _init_group(self, raw: bytes) -> dict[str, Any]:
        body = protocol.parse(raw, protocol.InitWeightsUpdateGroupReqInput)
        failed, name = "Failed to initialize custom process group: ", body.group_name
        if name in self._groups:
            raise Refusal(failed + NAME_TAKEN)
        member = GroupMember(name, body.backend, next(iter(self.tensors.values())).device)
        address = (body.master_address, body.master_port)
        self._groups[name] = member
        try:
            await member.join(address, rank=body.rank_offset, world_size=body.world_size)
        except BaseException as error:
            self._groups.pop(name, None)
            if isinstance(error, (RuntimeError, OSError, ValueError)):
                raise Refusal(f"{failed}{error}.") from error
            raise
        logger.info("weight group joined", group=name, size=body.world_size)
        return _done("Succeeded to initialize custom process group.")

    async def _destroy_group(self, raw: bytes) -> dict[str, Any]:
        body = protocol.parse(raw, protocol.DestroyWeightsUpdateGroupReqInput)
        member = self._groups.pop(body.group_name, None)
        if member is None:
            raise Refusal("The group to be destroyed does not exist.")
        await asyncio.wrap_future(member.leave())
        return _done("Succeeded to destroy custom process group.")

    async def _relabel(self, raw: bytes) -> dict[str, Any]:
        body = protocol.parse(raw, protocol.UpdateWeightVersionReqInput)
        version = body.new_version
        if body.abort_all_requests:
            self.engine.abort(lambda generation: True)
        await asyncio.wrap_future(self.engine.relabel(version))
        self.model.version = version
        return _done(f"Weight version updated to {version}") | {"new_version": version}

    async def _check(self, raw: bytes) -> dict[str, Any]:
        body = protocol.parse(raw, protocol.CheckWeightsReqInput)
        if body.action != "checksum":
            raise Refusal(f"Unsupported action={body.action!r}")
        async with self._writing:
            each, whole = await asyncio.to_thread(checksums, self.tensors)
        ranks = [{"checksums": each, "per_gpu_checksum": whole}]
        return _done("Success.") | {"ranks": ranks, "per_engine_checksum": whole}


def _done(message: str) -> dict[str, Any]:
    return {"success": True, "message": message}


def _told(
    handler: Callable[[bytes], Awaitable[dict[str, Any]]],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        try:
            return as_json(await handler(await request.read()))
        except Refusal as refusal:
            return as_json({"success": False, "message": str(refusal)}, 400)

    return handle
