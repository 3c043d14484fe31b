"""The routes that bring new weights: a folder or a process group.

In SGLang's protocol, so that a publisher cannot tell the servers apart; but every name and shape is
checked before the first byte is written, and bytes are awaited while generation goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

from arealite.base import log
from arealite.impl.server import protocol
from arealite.impl.server.engine import Engine
from arealite.impl.server.group_member import GroupMember
from arealite.impl.server.protocol import Refusal, ServedModel, Update
from arealite.impl.server.weights import check_layout, stage_tensors, stage_weights
from arealite.impl.weights.buckets import Layout

logger = log.get(__name__)

NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or "
    "queued. Retract or finish them, then call /flush_cache."
)
NAME_TAKEN = "The specified group name has already been created, please use a different group name."


class UpdateRoutes:
    """Their handlers and the groups."""

    def __init__(self, engine: Engine, model: ServedModel) -> None:
        self.engine = engine
        self.model = model
        self.tensors = engine.decoder.model.state_dict(keep_vars=True)
        self._groups: dict[str, GroupMember] = {}

    def posts(self) -> dict[str, protocol.Post]:
        """Return each path with its type of body and its handler."""
        return {
            "/update_weights_from_disk": (
                protocol.UpdateWeightFromDiskReqInput,
                self._from_disk,
            ),
            "/update_weights_from_distributed": (
                protocol.UpdateWeightsFromDistributedReqInput,
                self._from_distributed,
            ),
            "/init_weights_update_group": (
                protocol.InitWeightsUpdateGroupReqInput,
                self._init_group,
            ),
            "/destroy_weights_update_group": (
                protocol.DestroyWeightsUpdateGroupReqInput,
                self._destroy_group,
            ),
            "/update_weight_version": (protocol.UpdateWeightVersionReqInput, self._relabel),
        }

    async def close(self, app: web.Application) -> None:
        """Leave the groups, without waiting for what blocks."""
        for member in self._groups.values():
            member.leave()

    async def _from_disk(self, body: protocol.UpdateWeightFromDiskReqInput) -> dict[str, Any]:
        path = body.model_path
        told = await self._update(body, lambda: stage_weights(self.tensors, path))
        logger.info("weights updated", version=self.engine.version, path=path)
        return _done("Succeeded to update model weights." + told)

    async def _from_distributed(
        self, body: protocol.UpdateWeightsFromDistributedReqInput
    ) -> dict[str, Any]:
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
        version = body.weight_version
        update = self.engine.update(stage, version=version, flush=body.flush_cache)
        if not await asyncio.wrap_future(update):
            raise Refusal(NOT_FLUSHED)
        if version is None:
            return ""
        self.model.relabel(version)
        return f" Weight version updated to {version}."

    async def _init_group(self, body: protocol.InitWeightsUpdateGroupReqInput) -> dict[str, Any]:
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

    async def _destroy_group(
        self, body: protocol.DestroyWeightsUpdateGroupReqInput
    ) -> dict[str, Any]:
        member = self._groups.pop(body.group_name, None)
        if member is None:
            raise Refusal("The group to be destroyed does not exist.")
        await asyncio.wrap_future(member.leave())
        return _done("Succeeded to destroy custom process group.")

    async def _relabel(self, body: protocol.UpdateWeightVersionReqInput) -> dict[str, Any]:
        version = body.new_version
        if body.abort_all_requests:
            self.engine.abort(lambda generation: True)
        await asyncio.wrap_future(self.engine.relabel(version))
        self.model.relabel(version)
        return _done(f"Weight version updated to {version}") | {"new_version": version}


def _done(message: str) -> dict[str, Any]:
    return {"success": True, "message": message}
