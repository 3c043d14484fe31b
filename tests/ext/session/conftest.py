"""A session on the real embedded server, which runs in the event loop of the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import arealite
from arealite.ext.embedded.embedded_server import EmbeddedServer
from tests.fakes.embedded import Brake, running, server_config
from tests.models import tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("session"), init_std=0.1)


@dataclass(kw_only=True)
class Opened:
    """A started session and its server."""

    session: arealite.Session
    server: EmbeddedServer
    brake: Brake

    def num_open(self) -> int:
        """Return the number of requests that run or wait at the server."""
        engine = self.server.engine
        return len(engine.decoder.running) + len(engine.waiting)


Open = Callable[..., AbstractAsyncContextManager[Opened]]


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """Options under which a session finds the server of a test and writes to the test's folder."""
    return {
        "cluster.name_root": str(tmp_path / "names"),
        "cluster.run_root": str(tmp_path / "runs"),
        "cluster.user": "test",
        "cluster.security": False,
        "cluster.heartbeat_s": 0.2,
        "optimizer.type": "sgd",
        "optimizer.warmup_steps": 0,
    }


@pytest.fixture
def opened(model: Path, tmp_path: Path, options: dict[str, Any]) -> Open:
    """Return a context manager of a server and a session."""

    @asynccontextmanager
    async def open_session(**arguments: Any) -> AsyncIterator[Opened]:
        overrides = options | arguments.pop("overrides", {})
        threads = torch.get_num_threads()
        async with running(server_config(model, tmp_path / "names")) as server:
            brake = Brake(server.engine)
            try:
                async with arealite.session(
                    model, servers=0, trial="trial", overrides=overrides, **arguments
                ) as session:
                    try:
                        yield Opened(session=session, server=server, brake=brake)
                    finally:
                        brake.release()
            finally:
                torch.set_num_threads(threads)

    return open_session
