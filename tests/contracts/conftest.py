"""The three servers that run the contract of a language-model server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import aiohttp
import pytest

from tests.contracts.backends import Backend, Trainer, trainer_process
from tests.fakes.embedded import Brake, embedded, weight_sum
from tests.fakes.sglang import FakeSGLang
from tests.models import tiny_model
from tests.sglang.shared import SharedServer
from tests.vllm.inside_server import InsideServer, inside_server

SERVERS = ["fake", "embedded", pytest.param("sglang", marks=pytest.mark.sglang)]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("models")
    return [str(tiny_model(root / f"m{seed}", seed=seed)) for seed in range(3)]


@pytest.fixture(params=SERVERS)
async def server(request: pytest.FixtureRequest, folders: list[str]) -> AsyncIterator[Backend]:
    """Return a server in its initial state, new or reset."""
    control: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        if request.param == "fake":
            fake = FakeSGLang(
                token_s=0.002, context_length=512, vocab_size=64, next_token=lambda ids: 9
            )
            url = (await stack.enter_async_context(fake)).url
            control = {"hold": lambda: setattr(fake, "hold_after", 2), "release": fake.release}
        elif request.param == "embedded":
            instance = await stack.enter_async_context(embedded(folders[0]))
            url, brake = instance.address, Brake(instance.engine)
            control = {"hold": brake.block, "release": brake.release, "is_streaming": False}
            control["weight_sum"] = partial(weight_sum, instance)
        else:
            real: SharedServer = request.getfixturevalue("sglang_server")
            url, folders = real.address, real.folders
        session = await stack.enter_async_context(aiohttp.ClientSession(url))
        backend = Backend(session, folders, is_scripted=request.param == "fake", **control)
        await backend.probe()
        yield backend


@pytest.fixture(scope="session")
def vllm_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InsideServer]:
    """Provide the real vLLM server of a session; tests use `vllm_server`."""
    with inside_server(tmp_path_factory.mktemp("vllm")) as server:
        yield server


@pytest.fixture
def vllm_server(vllm_session: InsideServer) -> InsideServer:
    """Return the real vLLM server with its first weights and the version "default"."""
    vllm_session.reset()
    return vllm_session


@pytest.fixture(scope="session")
def trainer() -> Iterator[Trainer]:
    """Return one trainer process for the session; each test creates its own group."""
    with trainer_process() as process:
        yield process
