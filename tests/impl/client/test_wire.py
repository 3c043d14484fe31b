"""Encoding and decoding of the protocol by the client, without a server."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import msgspec
import numpy as np
import pytest

from arealite.api.llm import LLMRequest, SamplingConfig
from arealite.api.server_protocol import GenerateRequest, ServerAnswer
from arealite.base.errors import GenerationRefused, InvariantError
from arealite.ext.sglang.sglang_protocol import SGLangProtocol
from arealite.ext.vllm.vllm_protocol import VLLMProtocol
from arealite.impl.client import answer_checks
from arealite.impl.http_client import error_message


def answer(ids: list[int], **meta: object) -> ServerAnswer:
    body = {
        "text": "x",
        "output_ids": ids,
        "meta_info": {
            "id": "a",
            "finish_reason": {"type": "length", "length": len(ids)},
            "output_token_logprobs": [[-0.5, i, None] for i in ids],
            **meta,
        },
    }
    return SGLangProtocol().decode_answer(json.dumps(body).encode())


def sent_params(sampling: SamplingConfig, num_sampled: int) -> dict[str, object]:
    """Return the sampling parameters of a request."""
    request = GenerateRequest(rid="a", input_ids=[1], sampling=sampling, num_sampled=num_sampled)
    return json.loads(SGLangProtocol().encode_request(request))["sampling_params"]


def test_sampling_params_are_explicit_and_shrink_by_generated_tokens() -> None:
    sampling = SamplingConfig(max_new_tokens=10, min_new_tokens=4, stop=["b"], stop_token_ids=[7])
    first = sent_params(sampling, 0)
    assert first == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "max_new_tokens": 10,
        "min_new_tokens": 4,
        "ignore_eos": False,
        "stop": ["b"],
        "stop_token_ids": [7],
    }
    later = sent_params(sampling, 6)
    assert (later["max_new_tokens"], later["min_new_tokens"]) == (4, 0)


def test_rows_of_most_probable_tokens_are_asked_for_and_read() -> None:
    protocol = SGLangProtocol()
    sampling = SamplingConfig(top_logprobs=2)
    request = GenerateRequest(rid="a", input_ids=[1], sampling=sampling, num_top=3)
    assert json.loads(protocol.encode_request(request))["top_logprobs_num"] == 3
    plain = GenerateRequest(rid="a", input_ids=[1], sampling=sampling)
    assert "top_logprobs_num" not in json.loads(protocol.encode_request(plain))
    rows = [[[-0.5, 7, None], [-1.5, 3, "c"]], [[-0.5, 8, None], [None, 4, None]]]
    read = answer([7, 8], output_top_logprobs=rows)
    assert read.top_tokens == [[tuple(entry) for entry in row] for row in rows]
    assert (read.is_renormalized, answer([7]).top_tokens) == (False, None)
    assert answer([7], output_top_logprobs=rows[:1], is_renormalized=True).is_renormalized


def test_event_of_a_stream_has_only_new_rows() -> None:
    body = {
        "output_ids": [7, 8, 9],
        "meta_info": {
            "finish_reason": None,
            "completion_tokens": 3,
            "output_token_logprobs": [[-0.5, i, None] for i in (7, 8, 9)],
            "output_top_logprobs": [[[-0.5, i, None]] for i in (7, 8, 9)],
        },
    }
    event = SGLangProtocol().decode_answer(json.dumps(body).encode(), 2)
    assert (event.output_ids, event.top_tokens) == ([9], [[(-0.5, 9, None)]])


@pytest.mark.parametrize(
    ("told", "version"), [("default", 0), (None, 0), ("7", 7), (3, 3), ("", 0), ("v2", 0)]
)
def test_version_that_is_not_an_integer_is_zero(told: str | int | None, version: int) -> None:
    assert answer_checks.parse_version(told) == version


def test_token_versions_come_from_spans() -> None:
    spans = [
        {"version": "default", "start": 0, "end": 1},
        {"version": "2", "start": 1, "end": 3},
    ]
    assert answer_checks.token_versions(answer([4, 5, 6], weight_versions=spans), 9) == [0, 2, 2]


def test_token_versions_without_spans_are_the_acknowledged_version() -> None:
    assert answer_checks.token_versions(answer([4, 5], weight_version="3"), 2) == [2, 2]


@pytest.mark.parametrize("ends", [(0, 1), (1, 3), (0, 3)])
def test_spans_that_do_not_cover_the_output_raise_an_error(ends: tuple[int, int]) -> None:
    spans = [{"version": "1", "start": ends[0], "end": ends[1]}]
    with pytest.raises(InvariantError, match="cover"):
        answer_checks.token_versions(answer([4, 5], weight_versions=spans), 0)


@pytest.mark.parametrize(
    "pairs",
    [[], [[-0.5, 4, None]], [[-0.5, 5, None], [-0.5, 4, None]], [[-0.5, 4, None], [None, 5, ""]]],
)
def test_logprobs_that_mismatch_the_ids_raise_an_error(pairs: list[object]) -> None:
    with pytest.raises(InvariantError, match="logprobs"):
        answer([4, 5], output_token_logprobs=pairs)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b'{"error":{"message":"too long"}}', "too long"),
        (b'{"error":"unknown field"}', "unknown field"),
        (b'{"message":"nope"}', "nope"),
        (b"Internal Server Error", "Internal Server Error"),
        (b"[1]", "[1]"),
    ],
)
def test_error_message_is_read_from_each_response_format(raw: bytes, text: str) -> None:
    assert error_message(400, raw) == f"HTTP 400: {text}"


def scored(logprobs: list[float | None]) -> ServerAnswer:
    """Return an answer with the log-probabilities of a prompt whose tokens are 0, 1, …"""
    scores = [[logprob, token, None] for token, logprob in enumerate(logprobs)]
    return answer([9], input_token_logprobs=scores)


SCORED = LLMRequest(
    request_id="a",
    group_id="g",
    input_ids=[0, 1, 2],
    sampling=SamplingConfig(),
    scores_prompt=True,
)


def test_scores_are_those_of_the_prompt_but_its_first_token() -> None:
    assert answer_checks.prompt_logprobs(scored([None, -1.0, -2.0]), SCORED) == [-1.0, -2.0]


TARGETS = msgspec.structs.replace(SCORED, target_ids=[[7, -1], [3, 7]])


def test_scores_of_named_tokens_are_found_in_the_rows_of_sglang() -> None:
    sent = GenerateRequest(
        rid="a", input_ids=[0, 1, 2], sampling=SamplingConfig(), target_ids=TARGETS.target_ids
    )
    assert msgspec.json.decode(SGLangProtocol().encode_request(sent))["token_ids_logprob"] == [3, 7]
    rows = [None, [[-0.3, 3, None], [-0.7, 7, None]], [[-1.3, 3, None], [-1.7, 7, None]]]
    raw = answer_checks.target_logprobs(answer([9], input_token_ids_logprobs=rows), TARGETS)
    expected = [[-0.7, -np.inf], [-1.3, -1.7]]
    np.testing.assert_allclose(np.frombuffer(raw, "<f4").reshape(2, 2), expected, rtol=1e-6)


def test_scores_of_named_tokens_are_an_array_in_vllm() -> None:
    sent = GenerateRequest(
        rid="a", input_ids=[0, 1, 2], sampling=SamplingConfig(), target_ids=TARGETS.target_ids
    )
    body = msgspec.json.decode(VLLMProtocol().encode_request(sent))
    assert body["sampling_params"]["prompt_logprob_token_ids"] == TARGETS.target_ids
    scores = np.array([[-0.7, -np.inf], [-1.3, -1.7]], np.float32)
    file = io.BytesIO()
    np.save(file, scores)
    logprobs = {"content": [{"token_id": 9, "logprob": -0.5}]}
    reply = {
        "request_id": "a",
        "choices": [
            {"index": 0, "token_ids": [9], "finish_reason": "length", "logprobs": logprobs}
        ],
        "prompt_token_id_logprobs": base64.b64encode(file.getvalue()).decode(),
    }
    decoded = VLLMProtocol().decode_answer(msgspec.json.encode(reply))
    assert answer_checks.target_logprobs(decoded, TARGETS) == scores.tobytes()


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [None, [[-0.3, 3, None], [-0.7, 7, None]]],
        [None, *[[[-0.3, 3, None], [None, 7, None]]] * 2],
        [None, [[-0.3, 3, None], [-0.7, 7, None]], [[-0.3, 3, None]]],
    ],
)
def test_missing_scores_of_named_tokens_are_refused(rows: list[Any]) -> None:
    with pytest.raises(GenerationRefused, match="use another kind of server"):
        answer_checks.target_logprobs(answer([9], input_token_ids_logprobs=rows), TARGETS)


@pytest.mark.parametrize("scores", [[], [None, -1.0], [None, -1.0, None]])
def test_missing_scores_are_refused(scores: list[float | None]) -> None:
    with pytest.raises(GenerationRefused, match="use another kind of server"):
        answer_checks.prompt_logprobs(scored(scores), SCORED)
