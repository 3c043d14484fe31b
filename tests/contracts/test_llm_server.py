"""The contract of all language-model servers, as observed with SGLang 0.5.23.

One suite runs against all backends, so that tests with the fake and the embedded server are valid
for SGLang.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest

from arealite.api.llm import LLMRequest, SamplingConfig
from arealite.ext.gateway.answer_stream import TokenStream
from arealite.ext.sglang.sglang_protocol import SGLangProtocol
from arealite.impl.client import answer_checks
from tests.contracts.backends import LONG, PROMPT, Backend, retractions


@pytest.mark.sglang_short
async def test_generate_returns_tokens_logprobs_and_versions(server: Backend) -> None:
    answer = await server.generate(6, rid="mine")
    server.check(answer)
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == 6
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert meta["id"] == "mine"
    assert meta["prompt_tokens"] == len(PROMPT)
    assert meta["weight_version"] == "default"
    assert retractions(answer) == 0
    assert server.versions(answer) == ["default"]
    assert isinstance(answer["text"], str)


async def test_zero_new_tokens_give_an_empty_answer(server: Backend) -> None:
    answer = await server.generate(0)
    assert answer["output_ids"] == []
    assert answer["meta_info"]["finish_reason"]["type"] == "length"


async def test_stop_token_is_in_the_output_and_the_finish_reason(server: Backend) -> None:
    everything = list(range(64))
    unheeded = await server.generate(20, sampling={"stop_token_ids": everything})
    assert len(unheeded["output_ids"]) == 20  # the suite's ignore_eos covers these too
    sampling = {"stop_token_ids": everything, "ignore_eos": False}
    answer = await server.generate(20, sampling=sampling)
    server.check(answer)
    assert len(answer["output_ids"]) == 1
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    assert answer["meta_info"]["finish_reason"]["matched"] == answer["output_ids"][0]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"input_ids": [5] * 600}, "longer than the model's context length"),
        ({"new": 5000}, "Requested token count exceeds"),
        ({"input_ids": None}, "Either text, input_ids or input_embeds"),
        ({"sampling": {"temperature": -1.0}}, "non-negative"),
    ],
)
async def test_invalid_request_is_refused_and_the_server_continues(
    server: Backend, body: dict[str, Any], text: str
) -> None:
    status, answer = await server.try_generate(**body)
    assert status == 400
    assert text in answer["error"]["message"]
    server.check(await server.generate(2))


@pytest.mark.parametrize("server", ["fake", "embedded"], indirect=True)
@pytest.mark.parametrize("ids", [[5, 64], [-1]])
async def test_tokens_outside_the_vocabulary_are_refused(server: Backend, ids: list[int]) -> None:
    # These crash a real SGLang, so the client never sends them: see tests/impl/client.
    status, answer = await server.try_generate(input_ids=ids)
    assert status == 400 and "input_ids" in answer["error"]["message"]
    server.check(await server.generate(2))


async def test_stream_is_cumulative_and_ends_with_the_finish_reason(server: Backend) -> None:
    task, events = await server.streaming(new=8)
    server.release()
    await task
    lengths = [len(event["output_ids"]) for event in events]
    assert lengths == sorted(lengths) and lengths[-1] == 8
    assert all(event["meta_info"]["finish_reason"] is None for event in events[:-1])
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "length"
    for event in events:
        server.check(event)


@pytest.mark.sglang_short
async def test_client_reads_each_token_of_a_stream_once(server: Backend) -> None:
    told: list[list[int]] = []
    request = LLMRequest(
        request_id="r",
        group_id="g",
        input_ids=PROMPT,
        sampling=SamplingConfig(),
        on_tokens=told.append,
    )
    stream = TokenStream(request, SGLangProtocol())
    sampling = {"max_new_tokens": 30, "ignore_eos": True, "stream_interval": 8}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    if server.hold is not None:  # else a slow client may get everything in one event
        server.hold()
    async with server.session.post("/generate", json=body | {"stream": True}) as response:
        async for data in response.content.iter_any():
            stream.feed(data)
            if told:
                server.release()
    answer = stream.answer
    assert answer is not None and answer.finish is not None
    assert [token for piece in told for token in piece] == answer.output_ids
    assert len(answer.logprobs) == len(answer.output_ids) == 30
    assert len(told) > 1 and len(told[0]) < 8
    assert answer_checks.token_versions(answer, -1) == [0] * 30


@pytest.mark.sglang_short
async def test_abort_returns_the_partial_output(server: Backend) -> None:
    rid = uuid.uuid4().hex
    task, events = await server.streaming(rid)
    status, _ = await server.post("/abort_request", rid=rid)
    assert status == 200
    await task
    server.check(events[-1])
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(events[-1]["output_ids"]) < LONG


async def test_abort_of_an_unknown_request_returns_200(server: Backend) -> None:
    assert (await server.post("/abort_request", rid="nobody"))[0] == 200
    assert (await server.post("/abort_request", abort_all=True))[0] == 200


async def test_pause_with_abort_ends_requests_with_their_partial_output(server: Backend) -> None:
    task, events = await server.streaming()
    status, answer = await server.post("/pause_generation")
    assert (status, answer["status"]) == (200, "ok")
    await task
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    held = asyncio.ensure_future(server.generate(2))
    assert (await server.get("/health"))[0] == 200
    assert not held.done()
    await server.post("/continue_generation")
    server.release()
    server.check(await held)


@pytest.mark.sglang_short
@pytest.mark.parametrize(("mode", "retracted"), [("retract", 1), ("in_place", 0)])
async def test_tokens_before_and_after_an_update_have_different_versions(
    server: Backend, mode: str, retracted: int
) -> None:
    task, events = await server.streaming()
    assert (await server.post("/pause_generation", mode=mode))[0] == 200
    status, answer = await server.post(
        "/update_weights_from_disk",
        model_path=server.folders[1],
        weight_version="7",
        flush_cache=mode == "retract",
    )
    assert status == 200 and answer["success"], answer
    assert (await server.get("/model_info"))[1]["weight_version"] == "7"
    await server.post("/continue_generation")
    server.release()
    await task
    last = events[-1]
    server.check(last)
    assert len(last["output_ids"]) == LONG
    assert last["meta_info"]["finish_reason"]["type"] == "length"
    assert retractions(last) == retracted
    assert server.versions(last) == (["default", "7"] if server.spans else ["7"])
    assert last["meta_info"]["weight_version"] == "7"


async def test_abort_ends_a_paused_request(server: Backend) -> None:
    rid = uuid.uuid4().hex
    task, events = await server.streaming(rid)
    await server.post("/pause_generation", mode="retract")
    await server.post("/abort_request", rid=rid)
    await task
    if server.spans:  # older versions stream only the last chunk's ids here, with all logprobs
        server.check(events[-1])
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    await server.post("/continue_generation")


async def test_update_waits_for_running_requests(server: Backend) -> None:
    task, events = await server.streaming(new=50)
    update = asyncio.ensure_future(server.load(1, weight_version="1"))
    server.release()
    await task
    status, answer = await update
    assert status == 200, answer
    assert server.versions(events[-1]) == ["default"]
    assert (await server.generate(2))["meta_info"]["weight_version"] == "1"


@pytest.mark.parametrize(
    "server", ["fake", pytest.param("sglang", marks=pytest.mark.sglang)], indirect=True
)
async def test_update_with_abort_all_requests_aborts_running_requests(server: Backend) -> None:
    task, events, crowd = await server.crowded()
    assert (await server.load(1, abort_all_requests=True))[0] == 200
    await task
    await crowd
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await server.get("/model_info"))[1]["weight_version"] == "default"


async def test_update_from_a_missing_folder_keeps_the_weights(server: Backend) -> None:
    status, answer = await server.post(
        "/update_weights_from_disk", model_path="/nowhere", weight_version="9"
    )
    assert status == 400 and not answer["success"]
    assert "Failed to get weights iterator" in answer["message"]
    assert (await server.get("/model_info"))[1]["weight_version"] == "default"


async def test_flush_cache_is_refused_while_requests_run(server: Backend) -> None:
    assert (await server.post("/flush_cache"))[0] == 200
    rid = uuid.uuid4().hex
    task, _ = await server.streaming(rid)
    assert (await server.post("/flush_cache"))[0] == 400
    await server.post("/pause_generation", mode="retract")
    assert (await server.post("/flush_cache"))[0] == 200
    await server.post("/continue_generation")
    await server.post("/abort_request", rid=rid)
    await task


async def test_repeated_pause_and_continue_without_a_pause_return_200(server: Backend) -> None:
    assert (await server.post("/continue_generation"))[0] == 200
    for _ in range(2):
        assert (await server.post("/pause_generation", mode="retract"))[0] == 200
    assert (await server.post("/continue_generation"))[0] == 200
    assert (await server.post("/pause_generation", mode="sideways"))[0] == 400
    server.check(await server.generate(1))


async def test_info_has_version_and_model_path(server: Backend) -> None:
    for path in ("/model_info", "/server_info"):
        status, info = await server.get(path)
        assert status == 200
        assert info["weight_version"] == "default"
        assert info["model_path"]
