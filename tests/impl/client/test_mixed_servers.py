"""One client with an SGLang server and a vLLM server."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.scripted_server import ScriptedServer
from tests.fakes.sglang import FakeSGLang
from tests.fakes.vllm import FakeVLLM
from tests.impl.client.conftest import request
from tests.impl.client.test_servers_client import expected
from tests.impl.client.test_streams import EIGHT, Told

ORDERS = pytest.mark.parametrize(
    ("kind", "other_kind"),
    [(FakeSGLang, FakeVLLM), (FakeVLLM, FakeSGLang)],
    ids=["sglang first", "vllm first"],
)


@ORDERS
async def test_groups_are_spread_over_servers_of_both_kinds(site, other_kind) -> None:
    async with site({"version": "1"}, {"version": "2", "kind": other_kind}) as s:
        responses = [await s.generate(f"g{number}") for number in range(6)]
        assert [len(server.requests) for server in s.servers] == [3, 3]
    assert all(response.output_ids == EIGHT for response in responses)
    assert sorted(response.versions[0] for response in responses) == [1, 1, 1, 2, 2, 2]


@ORDERS
async def test_generation_continues_at_a_server_of_the_other_kind(site, other_kind) -> None:
    settings = {"version": "1", "hold_after": 3}
    async with site(settings, {"version": "2", "kind": other_kind}) as s:
        first, second = s.servers
        task = asyncio.create_task(s.generate(min_new_tokens=4))
        await first.held(1)
        first.fail_next("die")  # the server dies at the resubmission
        await first.abort_all()
        response = await task
        (sent,) = second.requests
    assert sent.input_ids == [10, 20, 30, *EIGHT[:3]]
    assert (sent.sampling["max_new_tokens"], sent.sampling["min_new_tokens"]) == (5, 1)
    assert response.output_ids == EIGHT
    assert response.logprobs == [first.logprob(token) for token in EIGHT]
    assert response.versions == [1] * 3 + [2] * 5
    assert response.stop_reason == "length"


@pytest.mark.parametrize("kind", [FakeSGLang])
async def test_stream_of_an_sglang_server_continues_as_a_stream_of_vllm(site) -> None:
    told = Told()
    async with site(
        {"version": "1", "hold_after": 3, "kind": FakeSGLang},
        {"version": "2", "kind": FakeVLLM},
    ) as s:
        first, _ = s.servers
        task = asyncio.create_task(s.generate(on_tokens=told.append))
        await told.until(3)
        await first.kill()
        response = await task
    assert told.ids == response.output_ids == EIGHT
    assert response.versions == [1] * 3 + [2] * 5


@pytest.mark.parametrize("kind", [FakeSGLang])
async def test_concurrent_generations_survive_updates_and_a_crash_of_each_kind(site) -> None:
    kinds: list[type[ScriptedServer]] = [FakeSGLang, FakeVLLM, FakeSGLang, FakeVLLM]
    async with site(*({"kind": kind, "token_s": 0.0005} for kind in kinds)) as s:
        prompts = [[3 + number % 200, 5 + number % 50] for number in range(80)]
        tasks = [
            asyncio.create_task(
                s.client.generate(
                    request(f"g{number // 4}", request_id=str(number), input_ids=prompt)
                )
            )
            for number, prompt in enumerate(prompts)
        ]
        await s.servers[0].received(5)
        for server in s.servers[:2]:
            await server.push("1", "abort")
        for server in s.servers[2:]:
            await server.kill()
        responses = await asyncio.gather(*tasks)
    for prompt, response in zip(prompts, responses, strict=True):
        assert response.output_ids == expected(prompt, 8)
        assert len(response.versions) == len(response.logprobs) == 8
        assert response.versions == sorted(response.versions)
