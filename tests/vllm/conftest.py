"""The session's real vLLM server. It starts with the first test that requests it (40 s)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.vllm.inside_server import InsideServer, inside_server


@pytest.fixture(scope="session")
def vllm_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InsideServer]:
    """Provide the server of a session; tests use `server`."""
    with inside_server(tmp_path_factory.mktemp("vllm")) as server:
        yield server


@pytest.fixture
def server(vllm_session: InsideServer) -> Iterator[InsideServer]:
    """Return the server with the weights of `folders[0]`, the version "default" and no pause."""
    vllm_session.reset()
    yield vllm_session
    assert vllm_session.is_alive, f"the test killed the server\n{vllm_session.real.tail()}"
