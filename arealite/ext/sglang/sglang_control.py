"""Controls SGLang servers and embedded servers: every special case of SGLang's routes is here."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from arealite.base import log
from arealite.base.errors import RoleError
from arealite.base.model_folder import Shapes
from arealite.ext.server_processes.named_adapters import AdapterControl, Post
from arealite.ext.sglang.sglang_capabilities import read_capabilities
from arealite.impl.publisher.control import Capabilities, WeightGroup

logger = log.get(__name__)

ONE_TOKEN = {
    "input_ids": [1],
    "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
}
"""Request for a generation of one token."""


@dataclass(eq=False, kw_only=True)
class SGLangControl(AdapterControl):
    """One SGLang server or embedded server."""

    load_adapter_path = "/load_lora_adapter"
    unload_adapter_path = "/unload_lora_adapter"
    abort_all: ClassVar[Post] = ("/abort_request", {"abort_all": True})
    is_open: bool = False
    """A weight-update session is open."""
    _session_reset: bool = False
    """Whether a session that a crashed publisher may have left open was closed."""

    async def probe(self) -> Capabilities:
        """Continue the server, and read its capabilities."""
        with self.time_limit("the answer to a continue", self.status_s):
            await self.send_continue()
        spec_answer = await self.request("/openapi.json")
        info_answer = await self.request("/server_info")
        output_answer = await self.request("/generate", ONE_TOKEN, is_slow=True)
        output = _json_if_ok(output_answer)
        return read_capabilities(
            spec=_json_if_ok(spec_answer),
            info=_json_if_ok(info_answer),
            meta=output.get("meta_info", {}),
        )

    async def send_pause(self, mode: str) -> None:
        status, answer = await self.request("/pause_generation", {"mode": mode})
        if status != 200 and mode != "abort":
            logger.warning("pause refused", server=self.id, mode=mode, status=status)
            mode = "abort"
            status, answer = await self.request("/pause_generation", {"mode": mode})
        self.checked("/pause_generation", status, answer)
        if self.can.sessions and not self._session_reset:
            # Close a session that a crashed publisher left open. The call blocks unless paused.
            await self.request("/end_weight_update", {})
        self._session_reset = True
        self.flush = mode != "in_place"

    async def send_continue(self) -> None:
        await self.request_ok("/continue_generation", {})

    async def begin(self, shapes: Shapes) -> None:
        """Open a weight-update session if the server supports them; mark the server as broken."""
        if self.can.sessions and not self.is_open:
            status, _ = await self.request("/begin_weight_update", {})
            if status != 200:  # a session is open: the answer to its end was lost
                await self.request("/end_weight_update", {})
                await self.request_ok("/begin_weight_update", {})
            self.is_open = True
        self.broken = True

    async def end(self) -> None:
        """Close the session: the weights are complete."""
        if self.is_open:
            self.is_open = False
            await self.request_ok("/end_weight_update", {})
        self.broken = False

    async def load_folder(self, folder: Path, version: int) -> None:
        body = {"model_path": str(folder), "load_format": "auto"}
        await self._update("/update_weights_from_disk", body, version=version)

    async def join_group(self, group: WeightGroup, rank_offset: int) -> None:
        body = vars(group) | {"rank_offset": rank_offset}
        del body["timeout_s"]
        await self.request_ok("/init_weights_update_group", body, is_slow=True)

    async def receive(
        self,
        layout: Mapping[str, object],
        group_name: str,
        *,
        is_flat: bool,
        version: int | None,
    ) -> None:
        body = {**layout, "group_name": group_name}
        if is_flat:
            body["load_format"] = "flattened_bucket"
        await self._update("/update_weights_from_distributed", body, version=version)

    async def leave_group(self, group_name: str) -> None:
        body = {"group_name": group_name}
        await self.request("/destroy_weights_update_group", body, is_slow=True)

    async def mark_broken(self) -> bool:
        if self.can.relabel and self.is_open:
            self.is_open = False
            await self.request("/end_weight_update", {})
        return await super().mark_broken()

    async def reports_pause(self) -> bool | None:
        """Return whether the server is paused; SGLang 0.5.9 has no route for that."""
        status, _ = await self.request("/ready")
        if status in (200, 503):
            return status == 503
        return None

    async def _update(
        self, path: str, weights: Mapping[str, object], *, version: int | None
    ) -> None:
        """Post new weights or a part of them.

        Args:
            path: The route.
            weights: Describes the weights.
            version: Their version, with the last part; None with every other part.
        """
        label = None if version is None else str(version)
        body = {
            **weights,
            "weight_version": label,
            "flush_cache": self.flush and version is not None,
            "abort_all_requests": False,
        }
        status, answer = await self.request(path, body, is_slow=True)
        if status == 400 and "not flushed" in answer:
            # The server has new weights with the old version and prefix cache.
            await self._flush()
            if self.can.relabel and version is not None:
                await self.relabel(str(version), abort=False)
                return
            status, answer = await self.request(path, body, is_slow=True)
        self.checked(path, status, answer)

    async def _flush(self) -> None:
        """Empty the cache while paused: retract running requests, or else abort them."""
        for mode in ("retract", "abort"):
            await self.request_ok("/pause_generation", {"mode": mode})
            status, _ = await self.request("/flush_cache", {})
            if status == 200:
                return
        raise RoleError(f"{self.address} has new weights, but does not flush its old cache")


def _json_if_ok(reply: tuple[int, str]) -> dict[str, Any]:
    """Return the JSON of a reply (status, answer) with status 200; {} for another status."""
    status, answer = reply
    return msgspec.json.decode(answer) if status == 200 else {}
