"""Publishes a version as a LoRA adapter of its own name, beside generation: SGLang and vLLM.

The server loads `policy-7` while requests of `policy-6` run. Then its version label becomes
`policy-7`, the requests of `policy-6` are aborted, and `policy-6` is unloaded. A client continues
an aborted request under the new name. No cached prefix is shared by two names, so no cache is
dropped.

An adapter belongs to the base weights. They are loaded again if the version label does not say that
the server has them.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from arealite.api.llm_server import UNTRUSTED
from arealite.api.server_protocol import MARK, adapter_name, adapter_of
from arealite.impl.publisher.control import ServerControl

MODELS_PATH = "/v1/models"
NEVER_UPDATED = "default"
"""Version label of a server that has the weights of its start."""
ABORT_S = 0.05
"""Seconds between aborts while requests keep an adapter from being unloaded."""
NOT_PLAIN = ("use_rslora", "alpha_pattern", "rank_pattern")
"""Fields of adapter_config.json that SGLang ignores, and vLLM in part: it computes alpha / rank."""

NAME_WITH_VERSION = re.compile(rf"[\w.-]+{MARK}[0-9]+", re.ASCII)
"""An adapter of a session."""

Post = tuple[str, Mapping[str, object]]
"""Route and body."""


@dataclass(eq=False, kw_only=True)
class AdapterControl(ServerControl):
    """A server that may load adapters by name."""

    load_adapter_path: ClassVar[str]
    unload_adapter_path: ClassVar[str]
    abort_all: ClassVar[Post]
    """Request that ends all requests for tokens."""

    def takes_adapter(self, config: Mapping[str, object]) -> bool:
        """Return whether the server scales an adapter of this config as the trainer does."""
        is_named = self.capabilities is not None and self.can.names_adapters
        is_plain = not any(config.get(field) for field in NOT_PLAIN)
        return super().takes_adapter(config) and (is_plain or not is_named)

    async def pause(self, mode: str) -> None:
        """Pause the server before whole weights are loaded, and unload its adapters.

        Requests that name them are aborted: they must not continue with other base weights.
        """
        names = await self._loaded_names() if self.can.names_adapters else []
        names = [name for name in names if adapter_of(name) or NAME_WITH_VERSION.fullmatch(name)]
        await super().pause("abort" if names else mode)
        for name in names:
            await self._unload(name)

    async def load_adapter(self, folder: Path, version: int) -> None:
        if not self.can.names_adapters:
            await super().load_adapter(folder, version)
            return
        self._pause_began = time.perf_counter()
        self._pause_ended = self._pause_began
        label = await self.version()
        if label != NEVER_UPDATED and not adapter_of(label):
            await self.pause("abort")
            await self.load_folder(Path(self.folder), int(UNTRUSTED))
        name = adapter_name(version)
        old_names = [name for name in await self._loaded_names() if adapter_of(name)]
        if name in old_names:  # a rolled-back trainer trains the same version again
            await self._unload(name)
            old_names.remove(name)
        body = {"lora_name": name, "lora_path": str(folder)}
        await self.request_ok(self.load_adapter_path, body, is_slow=True)
        await self.relabel(name, abort=False)
        self.adapter = name
        for old_name in old_names:
            await self._unload(old_name)

    async def finish(self, version: int) -> None:
        had_pause = self.is_paused
        await super().finish(version)
        if not had_pause:
            self.report = replace(self.report, stall_s=0.0)

    async def _loaded_names(self) -> list[str]:
        return loaded_names(await self.request_ok(MODELS_PATH))

    async def _unload(self, name: str) -> None:
        """Unload an adapter, and abort the requests that name it."""

        async def abort() -> None:
            await self.request_ok(*self.abort_all)

        body = {"lora_name": name}
        unloading = self.request_ok(self.unload_adapter_path, body, is_slow=True)
        await unload_and_abort(unloading, abort)


def loaded_names(answer: str | bytes) -> list[str]:
    """Return the names in an answer of MODELS_PATH: the model's, and those of adapters."""
    return [str(model["id"]) for model in msgspec.json.decode(answer)["data"]]


async def unload_and_abort(
    unload: Coroutine[Any, Any, object],
    abort: Callable[[], Awaitable[None]],
) -> None:
    """Unload an adapter, and abort the requests that name it until it is unloaded.

    SGLang waits for the end of these requests. vLLM does not, and refuses later ones.
    """
    unloading = asyncio.create_task(unload, name="unload an adapter")
    try:
        is_unloaded = False
        while not is_unloaded:
            await asyncio.wait([unloading], timeout=ABORT_S)
            is_unloaded = unloading.done()
            await abort()
        await unloading
    finally:
        unloading.cancel()
