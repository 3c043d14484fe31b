"""Behaviour of vLLM servers alone: a stream has versions only at its end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from arealite.base.errors import ServerUnavailable
from tests.fakes.scripted_server import ScriptedServer
from tests.fakes.vllm import FakeVLLM
from tests.impl.client.test_servers_client import expected
from tests.impl.client.test_streams import EIGHT, Told

UNKNOWN = r"streamed 3 tokens whose versions are unknown"


@pytest.fixture
def kind() -> type[ScriptedServer]:
    return FakeVLLM


async def test_generation_fails_if_its_stream_is_lost_after_tokens_were_passed_on(site) -> None:
    told = Told()
    async with site({"version": "1", "hold_after": 3}, {"version": "2"}) as s:
        first, second = s.servers
        task = asyncio.create_task(s.generate(on_tokens=told.append))
        await told.until(3)
        await first.kill()
        with pytest.raises(ServerUnavailable, match=UNKNOWN):
            await task
        assert not second.requests
        assert (await s.generate()).versions == [2] * 8
    assert told.ids == EIGHT[:3]


async def test_stream_that_is_lost_before_its_first_token_is_retried(site) -> None:
    told = Told()
    async with site({"hold_after": 0}, {}) as s:
        first, _ = s.servers
        task = asyncio.create_task(s.generate(on_tokens=told.append))
        await first.held(1)
        await first.kill()
        assert (await task).output_ids == told.ids == EIGHT


@pytest.mark.parametrize(
    "event",
    [{"error": {"message": "scripted", "code": 500}}, {"choices": "many"}],
)
async def test_error_within_a_stream_fails_the_generation(site, event: dict[str, Any]) -> None:
    told = Told()
    async with site() as s:
        (server,) = s.servers
        plain = server.event
        server.event = lambda job, sent: event if len(job.output) > 3 else plain(job, sent)
        with pytest.raises(ServerUnavailable, match=UNKNOWN):
            await s.generate(on_tokens=told.append)
    assert told.ids == EIGHT[:3]


async def test_streamed_tokens_of_too_old_weights_fail_the_generation(site) -> None:
    told = Told()
    async with site({"version": "5"}, refresh_s=600.0) as s:
        s.servers[0].version = "4"  # as after a restart that the client has not detected
        with pytest.raises(ServerUnavailable, match="unknown or too old"):
            await s.generate(on_tokens=told.append, min_version=5)
        assert s.client.stats()["stale_answers"] == 1
    assert told.ids


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_stream_across_an_update_has_the_version_of_each_token(site, mode: str) -> None:
    told = Told()
    async with site({"version": "1", "hold_after": 3}) as s:
        task = asyncio.create_task(s.generate(on_tokens=told.append))
        await told.until(3)
        await s.servers[0].push("2", mode)
        response = await task
    assert told.ids == response.output_ids == EIGHT
    assert response.versions == [1] * 3 + [2] * 5


async def test_prompts_after_an_update_in_place_use_the_cache_until_it_is_dropped(site) -> None:
    async with site({"version": "1"}) as s:
        (server,) = s.servers
        await s.generate()
        await server.push("2", "in_place")
        await s.generate()
        assert server.stale_prefix_hits == 1
        await server.push("3", "retract")
        assert (await s.generate()).output_ids == expected([10, 20, 30], 8)
        assert server.stale_prefix_hits == 1
