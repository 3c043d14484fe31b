"""Errors of an endpoint are retried a bounded number of times, and never show the API key."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from blockbuster import blockbuster_ctx
from structlog.testing import capture_logs

from arealite.api.llm import SamplingConfig
from arealite.base.errors import UserError
from arealite.ext.agents import completions_client
from arealite.ext.agents.completions_client import CompletionsClient, FixedPolicyFailed
from arealite.ext.agents.config import FixedPolicyConfig
from arealite.system.health import waits
from tests.fakes.completions import FakeCompletions
from tests.fakes.deadlines import WaitExpirer

HELLO = [{"role": "user", "content": "hello"}]
KEY = "sk-very-secret"


@asynccontextmanager
async def connected(*faults: str, **options):
    own = {"retries": 2, "timeout_s": 30.0} | options
    async with FakeCompletions(*faults) as server:
        config = FixedPolicyConfig(base_url=server.url, **own)
        async with CompletionsClient.connect(config) as endpoint:
            with blockbuster_ctx("arealite.ext.agents"):
                yield server, endpoint


@pytest.fixture(autouse=True)
def without_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions_client, "MAX_BACKOFF_S", 0.01)


async def test_conversation_and_sampling_options_are_sent() -> None:
    sampling = SamplingConfig(temperature=0.5, top_p=0.9, max_new_tokens=7, stop=["\n"])
    async with connected(model="m", sampling=sampling) as (server, endpoint):
        assert await endpoint.ask(HELLO, owner="seat judge") == "1: hello"
    assert server.bodies == [
        {
            "model": "m",
            "messages": HELLO,
            "temperature": 0.5,
            "top_p": 0.9,
            "max_tokens": 7,
            "stop": ["\n"],
        }
    ]
    assert "Authorization" not in server.headers[0]


@pytest.mark.parametrize(
    "fault",
    [
        *("500", "503", "429", "408", "reset", "hang", "nonsense", "{}", '{"choices": []}'),
        '{"choices": [{"message": {"content": null}}]}',
        '{"choices": [{"message": {"content": "\udcff"}}]}',
        '{"choices": [{"message": {"content": "' + "x" * (8 << 20) + '"}}]}',
    ],
    ids=lambda fault: fault[:12],
)
async def test_fault_is_retried(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expirer = WaitExpirer(monkeypatch, completions_client)
    async with connected(fault) as (server, endpoint):
        server.on_hang = lambda: expirer.expire(f"endpoint 127.0.0.1:{server.port}")
        assert await endpoint.ask(HELLO, owner="seat judge") == "1: hello"
    assert len(server.bodies) == 2


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("500", "HTTP 500"),
        ("429", "HTTP 429"),
        ("hang", "no answer in timeout_s=30"),
        ("nonsense", "not a chat completion"),
        ("reset", "Disconnected"),
    ],
)
async def test_lasting_fault_fails_after_all_attempts(
    fault: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expirer = WaitExpirer(monkeypatch, completions_client)
    async with connected(*[fault] * 9) as (server, endpoint):
        server.on_hang = lambda: expirer.expire(f"endpoint 127.0.0.1:{server.port}")
        with pytest.raises(FixedPolicyFailed, match=what) as raised:
            await endpoint.ask(HELLO, owner="seat judge")
    assert len(server.bodies) == 3
    assert expirer.expired == ([30.0] * 3 if fault == "hang" else [])
    assert raised.value.failure_class == "fixed_policy"


@pytest.mark.parametrize("fault", ["400", "401", "404", "redirect"])
async def test_refusal_is_not_retried(fault: str) -> None:
    async with connected(fault) as (server, endpoint):
        with pytest.raises(FixedPolicyFailed, match=r"HTTP (40\d|307)"):
            await endpoint.ask(HELLO, owner="seat judge")
    assert len(server.bodies) == 1


async def test_unreachable_endpoint_fails() -> None:
    async with connected() as (server, endpoint):
        await server._runner.cleanup()
        with pytest.raises(FixedPolicyFailed, match="Connect"):
            await endpoint.ask(HELLO, owner="seat judge")


@pytest.mark.parametrize("key", [KEY, f"{KEY}{'x' * 600}"], ids=["short", "long"])
@pytest.mark.parametrize("fault", ["500", "401"])
async def test_api_key_is_sent_and_never_logged(
    fault: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", f" {key}\n")
    with capture_logs() as logs:
        async with connected(*[fault] * 3, api_key_env="JUDGE_KEY") as (server, endpoint):
            with pytest.raises(FixedPolicyFailed) as raised:
                await endpoint.ask(HELLO, owner="seat judge")
    assert server.headers[0]["Authorization"] == f"Bearer {key}"
    assert "told Bearer ***" in str(raised.value)
    assert KEY not in str(raised.value) + repr(raised.value.__cause__) + str(logs)


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:1", "ftp://a/v1", "http:///v1", "http://me:pw@host/v1", "http://h?key=pw"],
)
async def test_invalid_address_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(UserError, match="base_url must be") as raised:
        async with CompletionsClient.connect(FixedPolicyConfig(base_url=url)):
            pass
    assert "pw" not in str(raised.value).replace("password", "")


async def test_missing_api_key_is_a_user_error() -> None:
    config = FixedPolicyConfig(base_url="http://h/v1", api_key_env="NO_SUCH_KEY")
    with pytest.raises(UserError, match="api_key_env=NO_SUCH_KEY"):
        async with CompletionsClient.connect(config):
            pass


async def test_concurrent_requests_are_bounded_and_cancelling_frees_a_slot() -> None:
    async with connected(connections=2) as (server, endpoint):
        server.released.clear()
        asks = [asyncio.create_task(endpoint.ask(HELLO, owner="seat judge")) for _ in range(5)]
        await server.received(2)
        assert len(server.bodies) == 2
        shown = [wait for wait in waits.table if wait.event == "an answer of a fixed policy"]
        assert {(wait.owner, wait.on) for wait in shown} == {
            ("seat judge", f"endpoint 127.0.0.1:{server.port}")
        }
        asks[0].cancel()
        asks[1].cancel()
        server.released.set()
        assert await asyncio.gather(*asks[2:]) == ["1: hello"] * 3
        assert server.most <= 4  # cancelled requests may still be in flight
    assert asks[0].cancelled()
    assert not [wait for wait in waits.table if wait.owner == "seat judge"]
