"""The fixture that runs a test with each kind of scripted server."""

from __future__ import annotations

import pytest

from tests.fakes.scripted_server import ScriptedServer
from tests.fakes.sglang import FakeSGLang
from tests.fakes.vllm import FakeVLLM


@pytest.fixture(params=[FakeSGLang, FakeVLLM], ids=["sglang", "vllm"])
def kind(request: pytest.FixtureRequest) -> type[ScriptedServer]:
    """Return the kind of the servers; a module with tests of one kind overrides the fixture."""
    return request.param
