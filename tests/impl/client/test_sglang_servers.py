"""Behaviour of SGLang servers alone: no spans, texts of stop strings, two forms of streams."""

from __future__ import annotations

import asyncio

import pytest

from arealite.api.llm import LLMResponse
from tests.fakes.scripted_server import ScriptedServer
from tests.fakes.sglang import FakeSGLang
from tests.impl.client.test_servers_client import aborted_before_the_end, expected
from tests.impl.client.test_streams import EIGHT, Told


@pytest.fixture
def kind() -> type[ScriptedServer]:
    return FakeSGLang


async def test_tokens_without_spans_have_the_acknowledged_version(site) -> None:
    async with site({"version": "1", "hold_after": 3, "spans": False}) as s:
        (server,) = s.servers
        task = asyncio.create_task(s.generate())
        await server.held(1)
        await server.push("2", "abort")
        # Tokens sent before version 2 was acknowledged count as version 1, never as newer.
        assert (await task).versions == [1] * 8
        assert (await s.generate(request_id="next")).versions == [2] * 8


async def test_versions_without_spans_are_not_newer_than_those_of_a_restarted_server(site) -> None:
    async with site({"version": "5", "spans": False}, refresh_s=60.0) as s:
        await s.servers[0].restart()  # version 0 again; the client has not detected it
        assert (await s.generate()).versions == [0] * 8


async def test_abort_after_a_stop_string_ends_the_generation(site) -> None:
    """vLLM ends the generation itself in the step that samples the end of the string."""
    tokens = expected([10, 20, 30], 3)
    async with site() as s:
        response = await aborted_before_the_end(s, {"stop": [chr(tokens[1]) + chr(tokens[2])]})
    assert (response.output_ids, response.stop_reason) == (tokens, "stop")


@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("spans", [False, True])
async def test_stream_of_either_form_equals_the_unstreamed_response(
    site, disjoint: bool, spans: bool
):
    told = Told()
    async with site({"version": "3", "disjoint": disjoint, "spans": spans}) as s:
        streamed = await s.generate(on_tokens=told.append)
        assert streamed == await s.generate()
        assert [sent.is_stream for sent in s.servers[0].requests] == [True, False]
    assert told.ids == streamed.output_ids == EIGHT
    assert len(told) > 1


@pytest.mark.parametrize("disjoint", [False, True])
async def test_tokens_streamed_before_the_server_died_are_kept(site, disjoint: bool) -> None:
    told, partial = Told(), list[LLMResponse]()
    settings = {"version": "1", "disjoint": disjoint}
    async with site({"hold_after": 3, **settings}, {**settings, "version": "2"}) as s:
        first, second = s.servers
        ask = s.generate(on_tokens=told.append, on_partial=partial.append)
        task = asyncio.create_task(ask)
        await told.until(3)
        await first.kill()
        response = await task
        assert second.requests[0].input_ids == [10, 20, 30, *EIGHT[:3]]
        assert second.requests[0].sampling["max_new_tokens"] == 5
        assert s.client.stats()["failovers"] == s.client.stats()["resubmissions"] == 1
        assert response.logprobs == [second.logprob(token) for token in EIGHT]
    assert told.ids == response.output_ids == EIGHT
    assert response.versions == [1] * 3 + [2] * 5
    assert [p.output_ids for p in partial] == [EIGHT[:3]]
    assert response.interruptions == 1


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_tokens_of_a_broken_stream_keep_the_versions_of_their_events(site, mode: str) -> None:
    told = Told()
    async with site({"version": "1", "hold_after": 3}, {"version": "3"}) as s:
        first, _ = s.servers
        task = asyncio.create_task(s.generate(on_tokens=told.append))
        await told.until(3)
        await first.pause(mode)
        await first.update_weights("2", keep_cache=True)
        first.hold_after = 5
        await first.resume()
        await told.until(5)
        await first.kill()
        response = await task
    assert told.ids == response.output_ids == EIGHT
    assert response.versions == [1] * 3 + [2] * 2 + [3] * 3


@pytest.mark.parametrize(
    ("event", "counter"),
    [
        ({"error": {"message": "scripted", "code": 500}}, "server_errors"),
        ({"output_ids": "many"}, "server_errors"),
    ],
)
async def test_error_within_a_stream_is_retried_after_its_tokens(site, event, counter) -> None:
    told = Told()
    async with site({}, {}) as s:
        first, second = s.servers
        plain = first.event
        first.event = lambda job, sent: event if len(job.output) > 3 else plain(job, sent)
        response = await s.generate(on_tokens=told.append)
        assert s.client.stats()[counter] == 1
        assert second.requests[0].input_ids == [10, 20, 30, *EIGHT[:3]]
    assert told.ids == response.output_ids == EIGHT


async def test_tokens_of_too_old_weights_are_never_passed_on(site) -> None:
    told = Told()
    async with site({"version": "5"}, {"version": "5"}, refresh_s=600.0) as s:
        first, _ = s.servers
        first.version = "4"  # as after a restart that the client has not detected
        response = await s.generate(on_tokens=told.append, min_version=5)
        assert s.client.stats()["stale_answers"] == 1
    assert told.ids == response.output_ids == EIGHT
    assert response.versions == [5] * 8
