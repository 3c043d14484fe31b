"""Scripted servers, their registry entries, and a publisher of any type."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from arealite.api.experiment_config import ExperimentConfig, ModelConfig
from arealite.api.publisher import DiskPublisherConfig, PublisherConfig, PublishReport
from arealite.api.trainer import PPOConfig, TrainerConfig
from arealite.api.trial import ClusterConfig
from arealite.base.errors import RoleError
from arealite.impl.publisher.control import ServerControl
from arealite.impl.publisher.disk import DiskPublisher
from arealite.impl.publisher.servers import ServersPublisher, ServersUpdate
from arealite.system.names.name_registry import NameRegistry
from tests.fakes.deadlines import Clock, WaitExpirer
from tests.fakes.scripted_server import ScriptedServer
from tests.waiting import eventually

GROUP = "g"


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"a.weight": torch.full((2, 3), value), "b.weight": torch.full((5,), -value)}


def publishing(folder: Path, model: Path, **publisher: Any) -> ExperimentConfig:
    """Return the config of a trial in `folder` whose servers need no token; `publisher` are
    fields of PublisherConfig."""
    cluster = ClusterConfig(
        name_root=str(folder / "names"),
        run_root=str(folder / "runs"),
        user="test",
        ttl_s=600.0,
        security=False,
    )
    return ExperimentConfig(
        cluster=cluster,
        model=ModelConfig(path=str(model)),
        trainer=TrainerConfig(ppo=PPOConfig(publisher=PublisherConfig(**publisher))),
    )


class TwoParts(DiskPublisher):
    """A publisher that sends each version in two parts."""

    async def update_server(self, server: ServerControl, version: int) -> None:
        async def send(server: ServerControl) -> None:
            await server.begin({"a.weight": [2, 3], "b.weight": [5]})
            for name, number in (("a.weight", None), ("b.weight", version)):
                await server.receive({"names": [name]}, GROUP, is_flat=False, version=number)

        update = ServersUpdate(self, [server], version)
        await update.pause()
        await update.send(send)
        await update.finish()


class Site:
    """Fake servers, their registry entries, and a publisher."""

    def __init__(self, tmp_path: Path, server_kind: type[ScriptedServer]) -> None:
        self.server_kind = server_kind
        self.names, self.tmp_path = NameRegistry.of(publishing(tmp_path, tmp_path)), tmp_path
        self.staged = tmp_path / "staged"
        self.kind: type[ServersPublisher] = DiskPublisher
        self.publisher: ServersPublisher | None = None
        self.expirer: WaitExpirer
        self.clock: Clock

    def register(self, server: ScriptedServer, server_id: str) -> None:
        """Register a server; waits of the publisher for it expire as soon as it hangs."""
        server.on_hang = lambda: self.expirer.expire(f"llm_server-{server_id}")
        self.names.put("llm_server", server_id, server.entry())

    async def publish(self, version: int, value: float = 1.0, **settings: Any) -> PublishReport:
        if self.publisher is None:
            settings = {
                "timeout_s": 60.0,
                "disk": DiskPublisherConfig(dir=str(self.staged)),
            } | settings
            config = publishing(self.tmp_path, self.tmp_path / "model", **settings)
            engine: Any = None
            self.publisher = self.kind(config, engine)
        await asyncio.to_thread(self.publisher.stage, version, iter(tensors(value).items()))
        return await asyncio.to_thread(self.publisher.push, version)

    async def refused(self, version: int, once: Callable[[], object], match: str) -> None:
        """Assert that a publish fails; the deadline passes as soon as `once` returns true."""
        pushing = asyncio.ensure_future(self.publish(version))
        await eventually(lambda: self.publisher is not None and once(), "a try")
        while not pushing.done():
            self.clock.advance(60.0)
            await asyncio.wait([pushing], timeout=0.1)
        with pytest.raises(RoleError, match=match):
            await pushing

    def quarantined(self) -> list[str]:
        assert self.publisher is not None
        return [server.id for server in self.publisher._servers.values() if server.error]

    def newest_folder(self) -> Path:
        """Return the folder of the only staged version."""
        (folder,) = self.staged.glob("*/v*")
        return folder

    def folder_of(self, version: int) -> Path:
        """Return the folder of a staged version."""
        (folder,) = self.staged.glob(f"*/v{version}")
        return folder

    def versions(self) -> list[str]:
        return sorted(p.name for folder in self.staged.iterdir() for p in folder.glob("v*"))


def paths(server: ScriptedServer) -> list[str]:
    return [path for path, _ in server.calls]


@asynccontextmanager
async def servers(site: Site, count: int) -> AsyncIterator[list[Any]]:
    async with AsyncExitStack() as stack:
        made = [await stack.enter_async_context(site.server_kind()) for _ in range(count)]
        for index, server in enumerate(made):
            site.register(server, f"s{index}")
        yield made
