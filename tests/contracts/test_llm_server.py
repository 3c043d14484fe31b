"""What every server behind the client must do, as observed of SGLang 0.5.23 on the wire.

One suite for all backends, so that tests against the fake and runs on the embedded server mean
something for SGLang.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.fakes.embedded import embedded
from tests.fakes.sglang import FakeSGLang
from tests.models import tiny_model

PROMPT = [5, 6, 7, 8]
LONG = 400


class Backend:
    """A server under test, and a session on it."""

    def __init__(self, session: aiohttp.ClientSession, weights: list[str]) -> None:
        self.session = session
        self.weights = weights
        """Two folders of other weights for the same model."""

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        async with self.session.post(path, json=body) as response:
            raw = await response.read()
            try:
                return response.status, json.loads(raw or b"null")
            except json.JSONDecodeError:
                return response.status, raw.decode()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(path) as response:
            raw = await response.read()
            return response.status, json.loads(raw or b"null")

    async def generate(self, new: int = 6, **body: Any) -> dict[str, Any]:
        status, answer = await self.try_generate(new, **body)
        assert status == 200, answer
        return answer

    async def try_generate(self, new: int = 6, **body: Any) -> tuple[int, Any]:
        sampling = {"max_new_tokens": new, "ignore_eos": True} | body.pop("sampling", {})
        body = {"input_ids": PROMPT, "return_logprob": True, "sampling_params": sampling} | body
        return await self.post("/generate", **body)

    async def streaming(self, rid: str = "s", new: int = LONG) -> tuple[asyncio.Task, list[dict]]:
        """Start a long streamed generation; return when its first tokens are there."""
        events: list[dict] = []
        started = asyncio.Event()

        async def read() -> None:
            body = {
                "input_ids": PROMPT,
                "rid": rid,
                "stream": True,
                "return_logprob": True,
                "sampling_params": {"max_new_tokens": new, "ignore_eos": True},
            }
            async with self.session.post("/generate", json=body) as response:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        events.append(json.loads(line[6:]))
                        started.set()

        task = asyncio.ensure_future(read())
        async with asyncio.timeout(20):
            await started.wait()
        return task, events


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("models")
    return [str(tiny_model(root / f"m{seed}", seed=seed)) for seed in range(3)]


@pytest.fixture(params=["fake", "embedded"])
async def server(request: pytest.FixtureRequest, folders: list[str]) -> AsyncIterator[Backend]:
    """A backend. Real SGLang becomes one more parameter here."""
    made = (
        FakeSGLang(token_s=0.002, context_length=512, vocab_size=64, next_token=lambda ids: 9)
        if request.param == "fake"
        else embedded(folders[0])
    )
    async with made as instance:
        url = instance.url if request.param == "fake" else instance.address
        async with aiohttp.ClientSession(url) as session:
            yield Backend(session, folders[1:])


def check_answer(answer: dict[str, Any]) -> None:
    """Check what holds for every answer: one length, spans that cover it."""
    meta, ids = answer["meta_info"], answer["output_ids"]
    pairs = meta["output_token_logprobs"]
    assert [token for _, token, _ in pairs] == ids
    assert all(logprob <= 0 for logprob, _, _ in pairs)
    assert meta["completion_tokens"] == len(ids)
    covered = [i for s in meta["weight_versions"] for i in range(s["start"], s["end"])]
    assert covered == list(range(len(ids)))


async def test_generate_answers_with_tokens_logprobs_and_versions(server: Backend) -> None:
    answer = await server.generate(6, rid="mine")
    check_answer(answer)
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == 6
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert meta["id"] == "mine"
    assert meta["prompt_tokens"] == len(PROMPT)
    assert meta["weight_version"] == "default"
    assert meta["num_retractions"] == 0
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 6}]
    assert isinstance(answer["text"], str)


async def test_batch_and_n_answer_with_lists_in_order(server: Backend) -> None:
    batch = await server.generate(3, input_ids=[[5, 6], [7, 8, 9]])
    assert [a["meta_info"]["prompt_tokens"] for a in batch] == [2, 3]
    copies = await server.generate(3, sampling={"n": 3})
    assert len(copies) == 3
    for answer in (*batch, *copies):
        check_answer(answer)


async def test_no_new_tokens_is_an_empty_answer(server: Backend) -> None:
    answer = await server.generate(0)
    assert answer["output_ids"] == []
    assert answer["meta_info"]["finish_reason"]["type"] == "length"


async def test_stop_token_is_kept_and_named(server: Backend) -> None:
    everything = list(range(64))
    answer = await server.generate(20, sampling={"stop_token_ids": everything})
    check_answer(answer)
    assert len(answer["output_ids"]) == 1
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    assert answer["meta_info"]["finish_reason"]["matched"] == answer["output_ids"][0]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"input_ids": [5] * 600}, "longer than the model's context length"),
        ({"new": 5000}, "Requested token count exceeds"),
        ({"input_ids": None}, "Either text, input_ids or input_embeds"),
        ({"input_ids": [5, 64]}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"sampling": {"temperature": -1.0}}, "temperature must be a non-negative finite number"),
    ],
)
async def test_bad_requests_are_refused_and_harm_nobody(
    server: Backend, body: dict[str, Any], text: str
) -> None:
    status, answer = await server.try_generate(**body)
    assert status == 400
    assert text in answer["error"]["message"]
    check_answer(await server.generate(2))


async def test_stream_is_cumulative_and_ends_with_the_reason(server: Backend) -> None:
    task, events = await server.streaming(new=8)
    await task
    lengths = [len(event["output_ids"]) for event in events]
    assert lengths == sorted(lengths) and lengths[-1] == 8
    assert all(event["meta_info"]["finish_reason"] is None for event in events[:-1])
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "length"
    for event in events:
        check_answer(event)


async def test_abort_returns_the_partial_output(server: Backend) -> None:
    task, events = await server.streaming("victim")
    status, _ = await server.post("/abort_request", rid="victim")
    assert status == 200
    await task
    check_answer(events[-1])
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(events[-1]["output_ids"]) < LONG


async def test_abort_of_an_unknown_request_is_fine(server: Backend) -> None:
    assert (await server.post("/abort_request", rid="nobody"))[0] == 200
    assert (await server.post("/abort_request", abort_all=True))[0] == 200


async def test_pause_abort_ends_all_with_what_they_have(server: Backend) -> None:
    task, events = await server.streaming()
    status, answer = await server.post("/pause_generation")
    assert (status, answer["status"]) == (200, "ok")
    await task
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    held = asyncio.ensure_future(server.generate(2))
    assert (await server.get("/health"))[0] == 200
    assert not held.done()
    await server.post("/continue_generation")
    check_answer(await held)


@pytest.mark.parametrize(("mode", "retractions"), [("retract", 1), ("in_place", 0)])
async def test_pause_update_continue_splits_the_versions(
    server: Backend, mode: str, retractions: int
) -> None:
    task, events = await server.streaming()
    assert (await server.post("/pause_generation", mode=mode))[0] == 200
    status, answer = await server.post(
        "/update_weights_from_disk",
        model_path=server.weights[0],
        weight_version="7",
        flush_cache=mode == "retract",
    )
    assert status == 200 and answer["success"], answer
    assert (await server.get("/model_info"))[1]["weight_version"] == "7"
    await server.post("/continue_generation")
    await task
    last = events[-1]
    check_answer(last)
    assert len(last["output_ids"]) == LONG
    assert last["meta_info"]["finish_reason"]["type"] == "length"
    assert last["meta_info"]["num_retractions"] == retractions
    assert [s["version"] for s in last["meta_info"]["weight_versions"]] == ["default", "7"]
    assert last["meta_info"]["weight_version"] == "7"


async def test_abort_while_paused(server: Backend) -> None:
    task, events = await server.streaming("victim")
    await server.post("/pause_generation", mode="retract")
    await server.post("/abort_request", rid="victim")
    await task
    check_answer(events[-1])
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    await server.post("/continue_generation")


async def test_update_waits_for_running_requests(server: Backend) -> None:
    task, events = await server.streaming(new=50)
    body = {"model_path": server.weights[0], "weight_version": "1"}
    update = asyncio.ensure_future(server.post("/update_weights_from_disk", **body))
    await task
    assert (await update)[0] == 200
    spans = events[-1]["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["default"]
    assert (await server.generate(2))["meta_info"]["weight_version"] == "1"


async def test_update_may_abort_the_running(server: Backend) -> None:
    task, events = await server.streaming()
    status, _ = await server.post(
        "/update_weights_from_disk", model_path=server.weights[0], abort_all_requests=True
    )
    assert status == 200
    await task
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await server.get("/model_info"))[1]["weight_version"] == "default"


async def test_update_from_nowhere_keeps_the_weights(server: Backend) -> None:
    status, answer = await server.post(
        "/update_weights_from_disk", model_path="/nowhere", weight_version="9"
    )
    assert status == 400 and not answer["success"]
    assert "Failed to get weights iterator" in answer["message"]
    assert (await server.get("/model_info"))[1]["weight_version"] == "default"


async def test_flush_cache_only_when_nothing_runs(server: Backend) -> None:
    assert (await server.post("/flush_cache"))[0] == 200
    task, _ = await server.streaming("busy")
    assert (await server.post("/flush_cache"))[0] == 400
    await server.post("/pause_generation", mode="retract")
    assert (await server.post("/flush_cache"))[0] == 200
    await server.post("/continue_generation")
    await server.post("/abort_request", rid="busy")
    await task


async def test_pausing_twice_and_continuing_without_pause_are_fine(server: Backend) -> None:
    assert (await server.post("/continue_generation"))[0] == 200
    for _ in range(2):
        assert (await server.post("/pause_generation", mode="retract"))[0] == 200
    assert (await server.post("/continue_generation"))[0] == 200
    assert (await server.post("/pause_generation", mode="sideways"))[0] == 400
    check_answer(await server.generate(1))


async def test_info_names_the_model(server: Backend) -> None:
    for path in ("/model_info", "/get_model_info", "/server_info", "/get_server_info"):
        status, info = await server.get(path)
        assert status == 200
        assert info["weight_version"] == "default"
        assert info["model_path"]
