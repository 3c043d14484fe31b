"""The real embedded server, run in the test's event loop."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from arealite.api.experiment_config import ModelConfig, ServerConfig
from arealite.api.llm_server import LLMServerConfig
from arealite.api.trial import ClusterConfig
from arealite.ext.embedded.config import EmbeddedServerConfig
from arealite.ext.embedded.decode_loop import Engine
from arealite.ext.embedded.embedded_server import EmbeddedServer


class Brake:
    """Stops an engine between two steps, so that a test finds a generation running."""

    def __init__(self, engine: Engine) -> None:
        self._wake, self._inbox = engine._wake, lambda: engine._inbox
        self._iterate, engine._run_iteration = engine._run_iteration, self._braked  # type: ignore[method-assign]
        self._is_on, self._free = False, 0

    def block(self, free: int = 0) -> None:
        """Stop the engine after `free` steps; each command then runs one step.

        A step samples a token for each request, two for a new one.
        """
        with self._wake:
            self._is_on, self._free = True, free

    def release(self) -> None:
        """Let the engine run without limit."""
        with self._wake:
            self._is_on = False
            self._wake.notify()

    def _braked(self) -> None:
        with self._wake:
            self._wake.wait_for(lambda: self._inbox() or self._free or not self._is_on)
            self._free = max(0, self._free - 1)
        self._iterate()


def server_config(model: Path | str, names: Path | str, **server: Any) -> ServerConfig:
    """Return the config of a server that needs no token; `max_running_requests` is an
    option of the engine."""
    rows = server.pop("max_running_requests", 64)
    embedded = EmbeddedServerConfig(max_running_requests=rows, device="cpu")
    cluster = ClusterConfig(
        name_root=str(names), user="test", heartbeat_s=0.2, ttl_s=600.0, security=False
    )
    return ServerConfig(
        cluster=cluster,
        model=ModelConfig(path=str(model)),
        llm_server=LLMServerConfig(embedded=embedded, **server),
    )


def weight_sum(server: EmbeddedServer) -> str:
    """Return a checksum of all weights; the server must not change them concurrently."""
    total = sha256()
    for name, tensor in server.engine.decoder.model.state_dict().items():
        total.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return total.hexdigest()


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
    """Serve a model with a temporary name root; `server` are fields of LLMServerConfig."""
    with tempfile.TemporaryDirectory() as names:
        async with running(server_config(model, names, **server)) as instance:
            yield instance
