"""Agents elsewhere lease tasks over HTTP, post rewards and end their sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from arealite.ext.gateway.config import GatewayConfig
from arealite.ext.gateway.gateway import Gateway
from arealite.ext.harness.env import HarnessEnv
from tests.ext.harness.harnesses import collecting
from tests.fakes.experiment import lease
from tests.waiting import eventually

TOKEN = {"Authorization": "Bearer hunter2"}
OPTIONS: dict[str, Any] = {"pull": True, "gateway": GatewayConfig(token_env="HARNESS_TOKEN")}


@pytest_asyncio.fixture
async def http() -> AsyncGenerator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as made:
        yield made


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_TOKEN", "hunter2")


def gateway_of(collector: Any) -> Gateway:
    env = collector.parts[""].env
    assert isinstance(env, HarnessEnv)
    return env.gateway


def url_of(collector: Any) -> str:
    return gateway_of(collector).url


async def post(http: Any, url: str, key: dict[str, str], body: Any = None) -> Any:
    async with http.post(url, json=body or {}, headers=key) as answer:
        return answer.status, await answer.json()


async def ask(http: Any, leased: dict[str, Any]) -> None:
    body = {"model": leased["model"], "messages": [{"role": "user", "content": "1+1="}]}
    key = {"x-api-key": leased["api_key"]}
    status, _ = await post(http, f"{leased['base_url']}/chat/completions", key, body)
    assert status == 200


async def test_leased_task_is_played_elsewhere_and_ended(http: aiohttp.ClientSession) -> None:
    async with collecting(**OPTIONS) as made:
        sessions = f"{url_of(made)}/v1/rl/sessions"
        plays = [asyncio.create_task(made.run(lease(number), 0)) for number in range(3)]
        for number, reward in enumerate((0.5, None, 0.25)):
            status, leased = await post(http, sessions, TOKEN, {"wait_s": 10})
            assert status == 200 and leased["task"]["task_id"] == f"train-{number}"
            await ask(http, leased)
            key = {"Authorization": f"Bearer {leased['api_key']}"}
            own = f"{sessions}/{leased['session_id']}"
            if reward is not None:
                assert (await post(http, f"{own}/reward", key, {"reward": reward}))[0] == 200
            assert (await post(http, f"{own}/end", TOKEN))[0] == 200
        episodes = [(await each)[0] for each in plays]
        assert [each.failure for each in episodes] == [None] * 3
        rewards = [each.headers[0].reward for each in episodes]
        assert rewards == [0.5, 1.0, 0.25], "the reward function scores a session without reward"
        assert (await post(http, sessions, TOKEN, {"wait_s": 0}))[0] == 429, "no task is left"


async def test_silent_session_fails_its_episode(http: aiohttp.ClientSession) -> None:
    async with collecting(idle_s=0.05, **OPTIONS) as made:
        play = asyncio.create_task(made.run(lease(), 0))
        status, leased = await post(http, f"{url_of(made)}/v1/rl/sessions", TOKEN, {"wait_s": 10})
        assert status == 200
        episode, _ = await play
        assert episode.failure is not None and episode.failure.failure_class == "harness_silent"
        key = {"x-api-key": leased["api_key"]}
        body = {"messages": [{"role": "user", "content": "a"}]}
        assert (await post(http, f"{leased['base_url']}/chat/completions", key, body))[0] == 410


async def test_session_is_not_silent_while_it_generates(http: aiohttp.ClientSession) -> None:
    async with collecting(idle_s=0.05, **OPTIONS) as made:
        client: Any = made._agents.client
        client.gate.clear()
        gateway = gateway_of(made)
        play = asyncio.create_task(made.run(lease(), 0))
        await eventually(lambda: gateway.sessions)
        (session,) = gateway.sessions.values()
        session.in_flight += 1  # it is not silent before its request has come
        url = f"{gateway.url}/v1/rl/sessions"
        _, leased = await post(http, url, TOKEN, {"wait_s": 10})
        asking = asyncio.create_task(ask(http, leased))
        await client.received(1)
        session.in_flight -= 1
        with pytest.raises(TimeoutError):  # far longer than idle_s
            await asyncio.wait_for(asyncio.shield(play), 0.3)
        client.gate.set()
        await asking
        await post(http, f"{url}/{leased['session_id']}/end", TOKEN)
        await play


async def test_deadline_of_an_episode_begins_when_an_agent_takes_its_task(
    http: aiohttp.ClientSession,
) -> None:
    async with collecting(episode_timeout_s=0.2, **OPTIONS) as made:
        play = asyncio.create_task(made.run(lease(), 0))
        with pytest.raises(TimeoutError):  # longer than episode_timeout_s
            await asyncio.wait_for(asyncio.shield(play), 0.5)
        await post(http, f"{url_of(made)}/v1/rl/sessions", TOKEN, {"wait_s": 10})
        episode, _ = await play
        assert episode.failure is not None
        assert episode.failure.failure_class == "episode_timeout"


async def test_waiting_task_is_not_silent_and_a_cancelled_one_is_not_leased(
    http: aiohttp.ClientSession,
) -> None:
    async with collecting(idle_s=0.01, **OPTIONS) as made:
        first, second = [asyncio.create_task(made.run(lease(n), 0)) for n in range(2)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(first, 0.1)  # cancels it
        sessions = f"{url_of(made)}/v1/rl/sessions"
        _, leased = await post(http, sessions, TOKEN, {"wait_s": 10})
        assert leased["task"]["task_id"] == "train-1"
        second.cancel()
        await asyncio.wait((second,))


async def test_tasks_need_the_token(http: aiohttp.ClientSession) -> None:
    async with collecting(**OPTIONS) as made:
        for key in ({}, {"Authorization": "Bearer other"}):
            assert (await post(http, f"{url_of(made)}/v1/rl/sessions", key))[0] == 401
