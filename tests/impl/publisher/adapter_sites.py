"""Fake servers that load adapters, a publisher of an adapter, and a client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from arealite.api.experiment_config import name_dir
from arealite.api.llm import (
    LLMClientConfig,
    LLMRequest,
    LLMResponse,
    SamplingConfig,
    ServersClientConfig,
)
from arealite.api.publisher import DiskPublisherConfig, PublishReport
from arealite.impl.client.servers_client import ServersClient
from arealite.impl.publisher.disk import DiskPublisher
from arealite.system.names.name_registry import NameRegistry
from tests.fakes.scripted_server import ScriptedServer
from tests.impl.publisher.sites import publishing, tensors
from tests.waiting import eventually

MAX_RANK = 8
MATRICES = "base_model.model.a.lora_A.weight", "base_model.model.a.lora_B.weight"


@dataclass(kw_only=True)
class AdapterSite:
    """A trial whose trainer trains an adapter."""

    servers: list[Any]
    client: ServersClient
    publisher: DiskPublisher
    names: NameRegistry
    silent: set[ScriptedServer] = field(default_factory=set[ScriptedServer])
    """Servers whose registry entries are no longer renewed."""

    async def publish(self, version: int, *, value: float | None = None) -> PublishReport:
        """Publish a version; repeat it as the trainer does while the publisher asks for it."""
        await asyncio.to_thread(self._stage, version, version if value is None else value)
        report = await asyncio.to_thread(self.publisher.push, version)
        while self.publisher.needs_republish:
            await asyncio.to_thread(self._stage, version, version if value is None else value)
            report = await asyncio.to_thread(self.publisher.push, version)
        return report

    def _stage(self, version: int, value: float) -> None:
        if not self.publisher.takes_adapter:
            self.publisher.stage(version, iter(tensors(float(value)).items()))
            return
        matrices = [(name, torch.full((2, 2), float(value))) for name in MATRICES]
        self.publisher.stage_adapter(version, iter(matrices))

    def is_adapter(self) -> bool:
        """Return whether the newest version is staged as an adapter."""
        assert self.publisher.newest is not None
        return (self.publisher._folder_of(self.publisher.newest) / "adapter_config.json").exists()

    async def generate(self, name: str = "r", **fields: Any) -> LLMResponse:
        """Generate 6 tokens through the client."""
        request = LLMRequest(
            request_id=name,
            group_id=name,
            input_ids=[10, 20, 30],
            sampling=SamplingConfig(max_new_tokens=6),
            **fields,
        )
        return await self.client.generate(request)

    async def known(self, label: str) -> None:
        """Wait until the client has read a version label of each server."""
        states = self.client._router.servers
        await eventually(
            lambda: all((s.version_name("") or str(s.version)) == label for s in states.values()),
            f"the label {label}",
        )

    def _entry(self, server: ScriptedServer) -> dict[str, Any] | None:
        return server.entry() if server.is_up and server not in self.silent else None


@asynccontextmanager
async def adapter_site(
    tmp_path: Path,
    *kinds: type[ScriptedServer],
    adapter_config: dict[str, Any] | None = None,
    max_rank: int = MAX_RANK,
    **publisher: Any,
) -> AsyncIterator[AdapterSite]:
    """Start a server of each kind, a client that knows them, and a publisher."""
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    save_file(tensors(0.0), model / "model.safetensors")
    settings = {"timeout_s": 60.0, "disk": DiskPublisherConfig(dir=str(tmp_path / "staged"))}
    config = publishing(tmp_path, model, **(settings | publisher))
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": str(model)}
    engine: Any = SimpleNamespace(
        adapter_config=fields | (adapter_config or {}), unused_tensors=frozenset()
    )
    names = NameRegistry(root=name_dir(config), ttl_s=600.0, heartbeat_s=0.02)
    limits = {"request_timeout_s": 60.0, "connect_timeout_s": 60.0, "refresh_s": 0.05}
    async with AsyncExitStack() as stack:
        servers: list[Any] = []
        for kind in kinds:
            server: Any = kind(model_path=str(model))
            server.adapters.max_rank = max_rank
            servers.append(await stack.enter_async_context(server))
        client = ServersClient(config, LLMClientConfig(servers=ServersClientConfig(**limits)))
        site = AdapterSite(
            servers=servers,
            client=client,
            publisher=DiskPublisher(config, engine),
            names=names,
        )
        for index, server in enumerate(servers):
            value = partial(site._entry, server)
            await stack.enter_async_context(names.registered("llm_server", f"s{index}", value))
        await client.start()
        stack.push_async_callback(client.close)
        stack.push_async_callback(asyncio.to_thread, site.publisher.close)
        yield site
