"""Weights of the fake vLLM: checked updates, failed updates, and the prefix cache.

The fake joins no process group and receives no bytes. Between the first new tensors and the end of
an update, and after a failed update, the model is broken: a token sampled then ends the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web
from arealite_vllm_checkpoint import (
    ServedCheckpoint,
    TensorHeader,
    UpdateRefused,
    read_headers,
)

from tests.fakes.scripted_server import BODY, error_answer, folder_content, json_answer

if TYPE_CHECKING:
    from tests.fakes.vllm import FakeVLLM

Body = dict[str, Any]
RELOAD = "/collective_rpc reload_weights"


class WorkerFailed(Exception):
    """Status 500 with this message."""


class VLLMWeights:
    """Handlers of the weight routes, and their state."""

    def __init__(self, fake: FakeVLLM) -> None:
        self.fake = fake
        self.forget()

    def forget(self) -> None:
        """Reset the state, as a start does; the served folder is read."""
        self.content = "start"
        """Identifies the weights."""
        self.obstacle = ""
        """Why the server must not sample, as our modules know it."""
        self.needs_restart = False
        self.is_broken = False
        """Whether the model has incomplete weights."""
        self.has_group = False
        self.is_active = False
        """Whether an update has been started and not finished."""
        self.checked: Body | None = None
        """The arguments of the check of the next update."""
        self.missing_names = set[str]()
        self._prefixes: dict[tuple[str | int, ...], str] = {}
        """The weights that computed each cached prompt."""
        folder = Path(self.fake.model_path)
        self._served: ServedCheckpoint | None = None
        if any(folder.glob("*.safetensors")):
            self._served = ServedCheckpoint(headers=read_headers(folder), is_tied=False)

    def handlers(self) -> dict[str, Any]:
        """Return a handler for each path."""
        table: dict[str, Callable[[Body], Awaitable[Body]]] = {
            "/collective_rpc": self._rpc,
            "/init_weight_transfer_engine": self._init,
            "/shutdown_weight_transfer_engine": self._shutdown,
            "/start_weight_update": self._start,
            "/update_weights": self._update,
            "/finish_weight_update": self._finish,
            "/reset_prefix_cache": self._reset_prefixes,
            "/update_weight_version": self._relabel,
        }
        return {path: self._answering(handler) for path, handler in table.items()}

    def _answering(self, handler: Callable[[Body], Awaitable[Body]]) -> Any:
        async def handle(request: web.Request) -> web.Response:
            is_start = request.path == "/start_weight_update"
            if is_start and self.fake.has_modules and self.fake.paused is None:
                return error_answer(409, "pause the server before a weight update")
            try:
                return json_answer(await handler(request[BODY]))
            except (WorkerFailed, UpdateRefused) as error:
                return error_answer(500, f"Worker failed with error '{error}'")

        return handle

    # ------------------------------------------------------------ state

    def complete(self, content: str) -> None:
        """Load complete weights."""
        self.content = content
        self.obstacle = ""
        self.is_broken = False
        self.is_active = False
        self.checked = None

    def fail(self, route: str, reason: str) -> None:
        """Leave the model half loaded if the request changes it, as a failure within it does."""
        if route == RELOAD:
            self.is_broken = True
        elif route == "/update_weights" and self.is_active:
            self.begin_change()
            self._give_up(reason)
        elif route == "/finish_weight_update" and self.is_active:
            self._give_up(reason)

    def begin_change(self) -> None:
        """Break the model until the update is finished."""
        self.is_broken = True
        self.obstacle = "a weight update is not finished"

    def _give_up(self, reason: str) -> None:
        """End an unfinished update."""
        self.checked = None
        self.is_active = False
        if not self.is_broken:
            return
        self.obstacle = f"a weight update failed ({reason}); update all weights again"
        if not self.fake.is_repairable:
            self.needs_restart = True
            self.obstacle = f"a weight update failed ({reason}); restart the server"

    def uses_stale_prefix(self, prompt: list[int], adapter: str) -> bool:
        """Return whether the cache has a prompt of other weights; add the prompt to the cache.

        The key has the name and the folder of the adapter, but not what is in the folder.
        """
        adapters = self.fake.adapters
        key = (adapter, adapters.path_of_name.get(adapter, ""), *prompt)
        content = self.content + adapters.content_of_name.get(adapter, "")
        return self._prefixes.setdefault(key, content) != content

    def drop_prefixes(self) -> None:
        """Empty the prefix cache."""
        self._prefixes.clear()

    # ------------------------------------------------------------ routes

    async def _rpc(self, body: Body) -> Body:
        kwargs = body.get("kwargs") or {}
        methods: dict[str, Callable[..., Awaitable[Any]]] = {"reload_weights": self._reload}
        if self.fake.has_modules:
            methods["arealite_check_weights"] = self._check
            methods["arealite_state"] = self._state
        method = methods.get(body["method"])
        if method is None:
            raise WorkerFailed(f"'Worker' object has no attribute '{body['method']}'")
        return {"results": [await method(**kwargs)]}

    async def _state(self) -> Body:
        return {
            "obstacle": self.obstacle,
            "needs_restart": self.needs_restart,
            "start_id": self.fake.start_id,
            "version": self.fake.program_version,
            "dtype": self.fake.dtype,
            "logprobs_mode": self.fake.logprobs_mode,
        }

    async def _reload(self, weights_path: str) -> None:
        """Load a folder as stock vLLM does, without a check."""
        self.is_broken = True
        content = None
        with suppress(OSError):
            content = await asyncio.to_thread(self.read_folder, weights_path)
        if content is None:
            raise WorkerFailed(f"{weights_path} is no folder")
        self.complete(content)

    async def _check(
        self,
        path: str = "",
        shapes: dict[str, list[int]] | None = None,
        unused: tuple[str, ...] = (),
    ) -> Body:
        self._give_up("its sender began another update")
        if self.needs_restart:
            return {"refusal": self.obstacle}
        try:
            headers = await asyncio.to_thread(read_headers, Path(path)) if path else None
            if headers is None:
                headers = {
                    name: TensorHeader(shape=tuple(shape), code="F32")
                    for name, shape in (shapes or {}).items()
                }
            if self._served is not None:
                self._served.check(headers, unused)
        except UpdateRefused as error:
            return {"refusal": str(error)}
        self.checked = {"path": path}
        self.missing_names = set() if path else set(headers)
        return {"refusal": ""}

    async def _start(self, body: Body) -> Body:
        if self.is_active:
            raise WorkerFailed("a weight update is active already")
        if self.checked is None:
            raise WorkerFailed("call arealite_check_weights before /start_weight_update")
        self.is_active = True
        return {"message": "Weight update started"}

    async def _update(self, body: Body) -> Body:
        info = body["update_info"]
        if not self.is_active or self.checked is None:
            raise WorkerFailed("call /start_weight_update before /update_weights")
        path = info.get("path", "")
        if path != self.checked["path"]:
            self._give_up("another path")
            raise UpdateRefused(f"path {path!r} is not the checked {self.checked!r}")
        if not path and not self.has_group:
            self._give_up("no group")
            raise UpdateRefused("call /init_weight_transfer_engine before /update_weights")
        self.begin_change()
        self.missing_names -= set(info.get("names", ()))
        if path:
            try:
                self.content = str(await asyncio.to_thread(self.read_folder, path))
            except OSError as error:
                self._give_up(str(error))
                raise WorkerFailed(str(error)) from error
        else:
            self.content = f"{self.content} {info['names']}"
        return {"message": "Weights updated"}

    def read_folder(self, path: str) -> str | None:
        """Return the identity of the weights in a folder; None if it does not exist."""
        return folder_content(path)

    async def _finish(self, body: Body) -> Body:
        if not self.is_active:
            raise WorkerFailed("no weight update is active")
        if self.missing_names:
            names = ", ".join(sorted(self.missing_names))
            self._give_up("missing tensors")
            raise UpdateRefused(f"tensors did not arrive: {names}")
        self.complete(self.content)
        self.fake.version = body.get("weight_version", self.fake.version)
        return {"message": "Weight update finished"}

    async def _init(self, body: Body) -> Body:
        if not self.fake.has_modules:
            raise WorkerFailed("no weight transfer backend is configured")
        self.has_group = True
        return {"message": "Weight transfer initialized"}

    async def _shutdown(self, body: Body) -> Body:
        self.has_group = False
        return {"message": "Weight transfer ended"}

    async def _reset_prefixes(self, body: Body) -> Body:
        if self.fake.holds_blocks:
            return {"success": False}
        self.drop_prefixes()
        return {"success": True}

    async def _relabel(self, body: Body) -> Body:
        self.fake.version = body["new_version"]
        return {"success": True, "new_version": body["new_version"]}
