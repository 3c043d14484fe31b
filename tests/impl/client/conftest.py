"""A client with fake servers that are registered in a folder of the test."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from blockbuster import blockbuster_ctx

from arealite.api.experiment_config import ExperimentConfig, name_dir
from arealite.api.llm import LLMClientConfig, LLMRequest, SamplingConfig, ServersClientConfig
from arealite.api.trial import ClusterConfig
from arealite.impl.client.servers_client import ServersClient
from arealite.system.names.name_registry import NameRegistry
from tests.fakes.scripted_server import ScriptedServer
from tests.fakes.server_kinds import kind as kind


class Site:
    """Fake servers and a client that discovered them."""

    def __init__(self, client: ServersClient, servers: list[ScriptedServer], names: NameRegistry):
        self.client, self.servers, self.names = client, servers, names
        self.silent = set[ScriptedServer]()
        """Servers whose registry entries are no longer renewed."""

    def value(self, server: ScriptedServer) -> dict[str, Any] | None:
        """Return the registry value that a server's supervisor writes."""
        return server.entry() if server.is_up and server not in self.silent else None

    async def generate(self, group: str = "g", **settings: Any) -> Any:
        """Generate 8 tokens after a prompt of 3 tokens, unless arguments differ."""
        return await self.client.generate(request(group, **settings))


def request(group: str = "g", **settings: Any) -> LLMRequest:
    names = {field.name for field in dataclasses.fields(SamplingConfig)}
    sampling = {"max_new_tokens": 8} | {k: v for k, v in settings.items() if k in names}
    rest = {k: v for k, v in settings.items() if k not in names}
    return LLMRequest(
        request_id=rest.pop("request_id", f"{group}/0"),
        group_id=group,
        input_ids=rest.pop("input_ids", [10, 20, 30]),
        sampling=SamplingConfig(**sampling),
        **rest,
    )


@pytest.fixture
def experiment(tmp_path: Path) -> ExperimentConfig:
    # Entries expire only if a test removes them.
    cluster = ClusterConfig(name_root=str(tmp_path / "names"), ttl_s=600.0, user="test")
    return ExperimentConfig(cluster=cluster, server_wait_s=60.0)


@pytest.fixture
def site(experiment: ExperimentConfig, kind: type[ScriptedServer]) -> Callable[..., Any]:
    """Return a context with servers of one kind, unless a server's settings have its `kind`."""

    async def start(stack: AsyncExitStack, settings: dict[str, Any]) -> ScriptedServer:
        fields = {name: value for name, value in settings.items() if name != "kind"}
        server: ScriptedServer = settings.get("kind", kind)(**fields)
        return await stack.enter_async_context(server)

    @asynccontextmanager
    async def make(*settings: dict[str, Any], **client: Any) -> AsyncIterator[Site]:
        names = NameRegistry(root=name_dir(experiment), ttl_s=600.0, heartbeat_s=0.02)
        # Deadlines that do not pass unless a test shortens them.
        limits = {"request_timeout_s": 60.0, "connect_timeout_s": 60.0}
        own = ServersClientConfig(**({"refresh_s": 0.05} | limits | client))
        async with AsyncExitStack() as stack:
            servers = [await start(stack, one) for one in settings or ({},)]
            made = ServersClient(experiment, LLMClientConfig(servers=own))
            its = Site(made, servers, names)
            for index, server in enumerate(servers):
                value = partial(its.value, server)
                name = names.registered("llm_server", f"s{index}", value)
                await stack.enter_async_context(name)
            await made.start()
            stack.push_async_callback(made.close)
            with blockbuster_ctx("arealite.impl.client"):
                yield its

    return make
