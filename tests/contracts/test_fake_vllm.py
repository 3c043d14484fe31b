"""The fake vLLM answers as vLLM 0.32 does on the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest

from tests.fakes.scripted_server import next_letter
from tests.fakes.vllm import FakeVLLM
from tests.waiting import eventually

PATH = "/inference/v1/generate"


class Wire:
    """A fake and a session."""

    def __init__(self, server: FakeVLLM, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.session = session

    async def post(self, path: str, **body: object) -> tuple[int, Any]:
        """Return status and JSON of an answer."""
        async with self.session.post(path, json=body) as reply:
            return reply.status, await reply.json()

    async def generate(self, ids: list[int], **sampling: object) -> tuple[int, Any]:
        """Return status and body of a generation."""
        return await self.post(PATH, request_id="a", token_ids=ids, sampling_params=sampling)


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    async with (
        FakeVLLM(context_length=16) as server,
        aiohttp.ClientSession(server.url) as session,
    ):
        yield Wire(server, session)


async def test_answer_has_ids_logprobs_and_spans(wire: Wire) -> None:
    status, answer = await wire.generate([5, 6], max_tokens=2, logprobs=0, an_unknown_name=1)
    first = next_letter([5, 6])
    ids = [first, next_letter([5, 6, first])]
    (choice,) = answer["choices"]
    assert (status, answer["request_id"]) == (200, "generate-tokens-a")
    assert choice["token_ids"] == ids
    assert [token["token_id"] for token in choice["logprobs"]["content"]] == ids
    assert choice["finish_reason"] == "length"
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 2}]


async def test_budget_is_clipped_to_the_context(wire: Wire) -> None:
    for sampling in ({"max_tokens": 100}, {}):
        _, answer = await wire.generate([5, 6], **sampling)
        assert len(answer["choices"][0]["token_ids"]) == 14


@pytest.mark.parametrize(
    ("ids", "sampling"),
    [
        ([], {}),
        ([5] * 16, {"max_tokens": 1}),
        ([320], {}),
        ([5], {"max_tokens": 0}),
        ([5], {"temperature": -1.0}),
        ([5], {"stop": ["a"], "detokenize": False}),
    ],
)
async def test_invalid_request_is_refused(wire: Wire, ids: list[int], sampling: Any) -> None:
    status, _ = await wire.generate(ids, **sampling)
    assert status == 400


async def test_stream_has_new_tokens_in_each_event_and_spans_in_the_last(wire: Wire) -> None:
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3}, "stream": True}
    async with wire.session.post(PATH, json=body) as reply:
        *events, end, rest = (await reply.text()).split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    choices = [msgspec.json.decode(event.removeprefix("data: "))["choices"][0] for event in events]
    assert [len(choice["token_ids"]) for choice in choices] == [1, 1, 1]
    assert [choice["weight_versions"] is None for choice in choices] == [True, True, False]


async def test_abort_needs_the_whole_id_of_the_server(wire: Wire) -> None:
    wire.server.hold_after = 1
    body = {"request_id": "a", "token_ids": [5], "sampling_params": {"max_tokens": 3}}
    async with wire.session.post(PATH, json=body | {"stream": True}) as reply:
        await wire.server.held(1)
        await wire.post("/inference/v1/abort_requests", request_ids=["a", "generate-tokens-"])
        assert wire.server.running == 1
        await wire.post("/abort_requests", request_ids=["generate-tokens-a"])
        assert '"finish_reason":"abort"' in await reply.text()


async def test_routes_of_other_modes_are_absent() -> None:
    async with (
        FakeVLLM(dev_mode=False, scale_out=False) as server,
        aiohttp.ClientSession(server.url) as session,
    ):
        for path in ("/pause", "/resume", "/update_weights", "/collective_rpc"):
            async with session.post(path, json={}) as reply:
                assert reply.status == 404
        for path, status in (("/weight_info", 404), ("/version", 200), ("/v1/models", 200)):
            async with session.get(path) as reply:
                assert reply.status == status
        async with session.post(PATH, json={"token_ids": [5]}) as reply:
            assert reply.status == 403


async def test_prefix_cache_is_kept_by_an_update_and_dropped_on_request(wire: Wire) -> None:
    for weights in ("1", "2"):
        await wire.generate([5, 6], max_tokens=1)
        await wire.server.update_weights(weights, keep_cache=True)
    await wire.generate([5, 6], max_tokens=1)
    assert wire.server.stale_prefix_hits == 2
    assert await wire.post("/reset_prefix_cache") == (200, {"success": True})
    await wire.generate([5, 6], max_tokens=1)
    assert wire.server.stale_prefix_hits == 2


async def test_stock_server_knows_no_method_of_ours(wire: Wire) -> None:
    wire.server.has_modules = False
    status, answer = await wire.post("/collective_rpc", method="arealite_state", kwargs={})
    assert (status, "has no attribute" in answer["error"]["message"]) == (500, True)


async def test_token_from_incomplete_weights_ends_the_server(wire: Wire) -> None:
    server = wire.server
    post = wire.post
    server.weights.has_group = True
    assert (await post("/update_weights", update_info={}))[0] == 500
    assert (await post("/start_weight_update"))[0] == 409
    await post("/pause?mode=keep")
    assert (await post("/start_weight_update"))[0] == 500
    shapes = {"a": [1], "b": [1]}
    check = {"method": "arealite_check_weights", "kwargs": {"shapes": shapes}}
    assert await post("/collective_rpc", **check) == (200, {"results": [{"refusal": ""}]})
    assert (await post("/start_weight_update"))[0] == 200
    assert (await post("/update_weights", update_info={"names": ["a"]}))[0] == 200
    assert (await post("/resume"))[0] == 409
    status, answer = await post("/finish_weight_update", weight_version="1")
    assert (status, "did not arrive: b" in answer["error"]["message"]) == (500, True)
    assert (await post("/resume"))[0] == 409
    server.has_modules = False  # without the gate, vLLM samples
    assert (await post("/resume"))[0] == 200
    with pytest.raises(aiohttp.ClientError):
        await wire.generate([5, 6], max_tokens=1)
    await eventually(lambda: not server.is_up, "the end of the server")
    assert server.broken_tokens == 1
