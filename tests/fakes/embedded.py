"""The real embedded server, run in the test's event loop."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from arealite.api.config import ClusterConfig, ModelConfig, ServerConfig
from arealite.api.llm_server import EmbeddedServerConfig, LLMServerConfig
from arealite.impl.server.embedded import EmbeddedServer


def server_config(model: Path | str, names: Path | str, **server: Any) -> ServerConfig:
    """Return the config of a server; `max_running_requests` goes where it belongs."""
    rows = server.pop("max_running_requests", 64)
    embedded = EmbeddedServerConfig(max_running_requests=rows, device="cpu")
    return ServerConfig(
        cluster=ClusterConfig(name_root=str(names), user="test", heartbeat_s=0.2),
        model=ModelConfig(path=str(model)),
        llm_server=LLMServerConfig(embedded=embedded, **server),
    )


@asynccontextmanager
async def running(config: ServerConfig) -> AsyncIterator[EmbeddedServer]:
    """Serve while the body runs; errors of `serve` are raised here."""
    server = EmbeddedServer(config)
    serving = asyncio.ensure_future(server.serve())
    ready = asyncio.ensure_future(server.ready.wait())
    await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
    ready.cancel()
    if serving.done():
        serving.result()
    try:
        yield server
    finally:
        serving.cancel()
        await asyncio.wait((serving,))


@asynccontextmanager
async def embedded(model: Path | str, **server: Any) -> AsyncIterator[EmbeddedServer]:
    """Serve a model under throw-away names; `server` are fields of LLMServerConfig."""
    with tempfile.TemporaryDirectory() as names:
        async with running(server_config(model, names, **server)) as instance:
            yield instance
