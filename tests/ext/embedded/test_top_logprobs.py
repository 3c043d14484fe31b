"""The most probable tokens of an answer and the scores of a prompt, by transformers' softmax."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
import torch

from arealite.ext.embedded.weight_loading import load_model
from tests.fakes.embedded import embedded

PROMPT = [5, 6, 7, 8, 9]
VOCAB = 64


@pytest.fixture(scope="module")
def model(folders: list[Path]) -> Any:
    return load_model(str(folders[0]), dtype="float32", device="cpu")[0]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def session(folders: list[Path]) -> AsyncIterator[aiohttp.ClientSession]:
    async with (
        embedded(folders[0], max_running_requests=8) as instance,
        aiohttp.ClientSession(instance.address) as opened,
    ):
        yield opened


@torch.inference_mode()
def probs_of(model: Any, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Return the probabilities [T, V] after each token, in float64."""
    logits = model(torch.tensor([ids])).logits[0].double()
    return torch.softmax(logits / temperature, dim=-1)


def kept_by(probs_V: torch.Tensor, sampling: dict[str, Any]) -> list[int]:
    """Return the tokens that the sampling options keep, by falling probability."""
    order = probs_V.argsort(descending=True).tolist()
    top_k = sampling.get("top_k", VOCAB)
    kept, mass = list[int](), 0.0
    for token in order[:top_k]:
        prob = float(probs_V[token])
        if mass <= sampling.get("top_p", 1.0) and prob >= sampling.get("min_p", 0) * probs_V.max():
            kept.append(token)
        mass += prob
    return kept


async def generate(session: aiohttp.ClientSession, new: int, **body: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": new, "ignore_eos": True} | body.pop("sampling", {})
    fields = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True} | body
    async with session.post("/generate", json=fields) as response:
        answer = await response.json()
        assert response.status == 200, answer
    return answer


def check_row(row: list[list[Any]], ids: list[int], probs: torch.Tensor) -> None:
    """Check a row against the expected ids and their probabilities."""
    assert [token for _, token, _ in row] == ids
    logprobs = torch.tensor([logprob for logprob, _, _ in row], dtype=torch.float64)
    torch.testing.assert_close(logprobs, probs.log(), atol=1e-5, rtol=0)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_k": 1},
        {"top_p": 0.4, "temperature": 1.3},
        {"min_p": 0.3},
        {"top_k": 9, "top_p": 0.6, "min_p": 0.05, "temperature": 0.8},
        {"top_p": 0.999},
    ],
)
async def test_rows_are_the_most_probable_tokens_that_can_be_sampled(
    session: aiohttp.ClientSession, model: Any, sampling: dict[str, Any]
) -> None:
    answer = await generate(session, 12, sampling=sampling, top_logprobs_num=10)
    output, meta = answer["output_ids"], answer["meta_info"]
    rows, sampled = meta["output_top_logprobs"], meta["output_token_logprobs"]
    assert len(rows) == 12 and meta["is_renormalized"]
    probs_TV = probs_of(model, PROMPT + output, sampling.get("temperature", 1.0))
    for i, (row, token) in enumerate(zip(rows, output, strict=True)):
        probs_V = probs_TV[len(PROMPT) - 1 + i]
        kept = kept_by(probs_V, sampling)
        exact_V = probs_V / probs_V[kept].sum()
        check_row(row, kept[:10], exact_V[kept[:10]])
        assert token in kept
        assert sampled[i][0] == pytest.approx(float(exact_V[token].log()), abs=1e-5)


@pytest.mark.asyncio(loop_scope="module")
async def test_row_has_at_most_the_vocabulary(session: aiohttp.ClientSession) -> None:
    answer = await generate(session, 2, top_logprobs_num=500)
    for row in answer["meta_info"]["output_top_logprobs"]:
        assert sorted(token for _, token, _ in row) == [*range(VOCAB)]
        assert sum(math.exp(logprob) for logprob, _, _ in row) == pytest.approx(1, abs=1e-5)


@pytest.mark.asyncio(loop_scope="module")
async def test_requests_of_a_batch_get_what_they_ask_for(
    session: aiohttp.ClientSession, model: Any
) -> None:
    cut = {"sampling": {"top_k": 3}}
    answers = await asyncio.gather(
        *[generate(session, 8, top_logprobs_num=n, **cut) for n in (0, 2, 7)]
    )
    for asked, answer in zip((0, 2, 7), answers, strict=True):
        meta = answer["meta_info"]
        rows = meta.get("output_top_logprobs", [])
        assert [len(row) for row in rows] == ([min(asked, 3)] * 8 if asked else [])
    plain = answers[0]  # SGLang's convention: of the whole vocabulary
    assert "is_renormalized" not in plain["meta_info"]
    probs_TV = probs_of(model, PROMPT + plain["output_ids"])
    for i, (logprob, token, _) in enumerate(plain["meta_info"]["output_token_logprobs"]):
        expected = float(probs_TV[len(PROMPT) - 1 + i, token].log())
        assert logprob == pytest.approx(expected, abs=1e-5)


@pytest.mark.asyncio(loop_scope="module")
async def test_events_of_a_stream_have_the_rows_of_their_tokens(
    session: aiohttp.ClientSession, model: Any
) -> None:
    sampling = {"max_new_tokens": 9, "ignore_eos": True, "stream_interval": 4, "top_k": 2}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "stream": True}
    body |= {"return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": 3}
    async with session.post("/generate", json=body) as response:
        events = (await response.read()).split(b"\n\n")
    answers = [msgspec.json.decode(event[6:]) for event in events if b"meta_info" in event]
    output = [token for answer in answers for token in answer["output_ids"]]
    rows = [row for answer in answers for row in answer["meta_info"]["output_top_logprobs"]]
    assert len(answers) > 1 and len(output) == len(rows) == 9
    probs_TV = probs_of(model, PROMPT + output)
    for i, row in enumerate(rows):
        probs_K, ids_K = probs_TV[len(PROMPT) - 1 + i].topk(2)
        check_row(row, ids_K.tolist(), probs_K / probs_K.sum())
    assert "input_token_logprobs" not in answers[0]["meta_info"]
    assert len(answers[-1]["meta_info"]["input_token_logprobs"]) == 2


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("new", "start"), [(0, 0), (1, 0), (1, 2), (0, 4)])
async def test_prompt_is_scored_at_temperature_1(
    session: aiohttp.ClientSession, model: Any, new: int, start: int
) -> None:
    sampling = {"temperature": 0.5}
    body = {"logprob_start_len": start, "top_logprobs_num": 6, "sampling": sampling}
    answer = await generate(session, new, **body)
    meta = answer["meta_info"]
    assert (len(answer["output_ids"]), len(meta["output_top_logprobs"])) == (new, new)
    scores, rows = meta["input_token_logprobs"], meta["input_top_logprobs"]
    assert [token for _, token, _ in scores] == PROMPT[start:]
    assert scores[0] == [None, PROMPT[start], None] and rows[0] is None
    probs_TV = probs_of(model, PROMPT)
    for i in range(start + 1, len(PROMPT)):
        probs_V = probs_TV[i - 1]
        assert scores[i - start][0] == pytest.approx(float(probs_V[PROMPT[i]].log()), abs=1e-5)
        probs_K, ids_K = probs_V.topk(6)
        check_row(rows[i - start], ids_K.tolist(), probs_K)


@pytest.mark.asyncio(loop_scope="module")
async def test_scores_of_a_prompt_need_no_rows(session: aiohttp.ClientSession) -> None:
    answer = await generate(session, 0, logprob_start_len=0)
    assert len(answer["meta_info"]["input_token_logprobs"]) == len(PROMPT)
    assert "input_top_logprobs" not in answer["meta_info"]
    answer = await generate(session, 0, logprob_start_len=-1)
    assert "input_token_logprobs" not in answer["meta_info"]
