"""LoRA adapters of the fake servers, as real SGLang 0.5.23 and vLLM 0.32 treat them on a CPU."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tests.fakes.scripted_server import BODY, Handler, error_answer, folder_content, json_answer

if TYPE_CHECKING:
    from tests.fakes.scripted_server import ScriptedServer


class FakeAdapters:
    """The adapters that a fake server has loaded, and their routes."""

    def __init__(self, fake: ScriptedServer) -> None:
        self.fake = fake
        self.max_rank = 0
        """Largest rank of an adapter; 0: started without adapters."""
        self.forget()

    def forget(self) -> None:
        """Unload all adapters, as a restart does."""
        self.content_of_name: dict[str, str] = {}
        """Identifies the weights of each adapter."""
        self.path_of_name: dict[str, str] = {}
        """The folder of each adapter that was ever loaded: SGLang loads it again by itself."""
        self.lock = asyncio.Lock()

    def refusal(self, name: str, path: str) -> str | None:
        """Load an adapter; return why the server refuses it, None if it does not."""
        if name in self.content_of_name:
            return f"LoRA adapter {name} is already loaded"
        config = Path(path) / "adapter_config.json"
        content = folder_content(path)
        if content is None or not config.is_file():
            return f"no LoRA adapter in {path}"
        rank = json.loads(config.read_text()).get("r", 8)
        if rank > self.max_rank:
            return f"LoRA rank {rank} is greater than max_lora_rank {self.max_rank}."
        self.content_of_name[name] = content
        self.path_of_name[name] = path
        return None

    def models(self) -> list[dict[str, Any]]:
        """Return the adapters in /v1/models."""
        names = [*self.content_of_name]
        return [{"id": name, "root": self.path_of_name[name]} for name in names]

    def num_using(self, name: str) -> int:
        """Return the number of running requests that name an adapter."""
        return sum(job.adapter == name for job in self.fake._jobs.values())


class SGLangAdapters(FakeAdapters):
    """Adapters of SGLang: an unload waits for its requests; an old name is loaded again."""

    def handlers(self) -> dict[str, Handler]:
        return {"/load_lora_adapter": self._load, "/unload_lora_adapter": self._unload}

    async def lacks(self, name: str) -> web.Response | None:
        """Return the answer to a request that names an adapter; None if it is loaded."""
        if not self.max_rank:
            return error_answer(
                400, f"LoRA adapter '{name}' was requested, but LoRA is not enabled"
            )
        if name in self.content_of_name:
            return None
        async with self.lock:
            path = self.path_of_name.get(name)
            if path is None:
                return error_answer(400, f"Got LoRA adapter that has never been loaded: {name}")
            reason = self.refusal(name, path)
        if reason is None:
            return None
        return error_answer(400, f"Failed to implicitly load LoRA adapter {name}: {reason}")

    async def _load(self, request: web.Request) -> web.Response:
        body = request[BODY]
        async with self.lock:
            reason = self.refusal(body["lora_name"], body["lora_path"])
        return self._answer(reason)

    async def _unload(self, request: web.Request) -> web.Response:
        name = request[BODY]["lora_name"]
        async with self.lock:
            if name not in self.content_of_name:
                return self._answer(f"LoRA with name {name} does not exist.")
            del self.content_of_name[name]
            await self.fake._until(lambda: not self.num_using(name))
        return self._answer(None)

    def _answer(self, reason: str | None) -> web.Response:
        answer = {
            "success": reason is None,
            "error_message": reason or "",
            "loaded_adapters": {name: self.path_of_name[name] for name in self.content_of_name},
        }
        return json_answer(answer, 200 if reason is None else 400)


class VLLMAdapters(FakeAdapters):
    """Adapters of vLLM: an unload waits for nothing, and its name is gone."""

    def handlers(self) -> dict[str, Handler]:
        return {"/v1/load_lora_adapter": self._load, "/v1/unload_lora_adapter": self._unload}

    async def lacks(self, name: str) -> web.Response | None:
        """Return the answer to a request that names an adapter; None if it is loaded."""
        if name in self.content_of_name:
            return None
        return error_answer(404, f"The model `{name}` does not exist. Valid aliases: policy.")

    async def _load(self, request: web.Request) -> web.Response:
        body = request[BODY]
        if not self.max_rank:
            raise web.HTTPNotFound
        reason = self.refusal(body["lora_name"], body["lora_path"])
        if reason is None:
            return web.Response(text=f"Success: LoRA adapter '{body['lora_name']}' added.")
        return error_answer(400 if "already" in reason else 500, reason)

    async def _unload(self, request: web.Request) -> web.Response:
        name = request[BODY]["lora_name"]
        if name not in self.content_of_name:
            return error_answer(404, f"The lora adapter '{name}' cannot be found.")
        del self.content_of_name[name]
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")
