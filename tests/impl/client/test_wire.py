"""What the client understands of the protocol, without a server."""

from __future__ import annotations

import json

import pytest

from arealite.api.llm import SamplingConfig
from arealite.base.errors import InvariantError
from arealite.impl.client import wire


def answer(ids: list[int], **meta: object) -> wire.Answer:
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
    return wire.decode_answer(json.dumps(body).encode())


def test_sampling_is_explicit_and_budgets_shrink() -> None:
    sampling = SamplingConfig(max_new_tokens=10, min_new_tokens=4, stop=["b"], stop_token_ids=[7])
    first = wire.sampling_params(sampling, 0)
    assert first == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 10,
        "min_new_tokens": 4,
        "ignore_eos": False,
        "stop": ["b"],
        "stop_token_ids": [7],
    }
    later = wire.sampling_params(sampling, 6)
    assert (later["max_new_tokens"], later["min_new_tokens"]) == (4, 0)


@pytest.mark.parametrize(
    ("told", "version"), [("default", 0), (None, 0), ("7", 7), (3, 3), ("", 0), ("v2", 0)]
)
def test_versions_are_integers_or_zero(told: str | int | None, version: int) -> None:
    assert wire.parse_version(told) == version


def test_versions_come_from_spans() -> None:
    spans = [
        {"version": "default", "start": 0, "end": 1},
        {"version": "2", "start": 1, "end": 3},
    ]
    assert wire.token_versions(answer([4, 5, 6], weight_versions=spans), 9) == [0, 2, 2]


def test_versions_without_spans_are_the_acknowledged_one() -> None:
    assert wire.token_versions(answer([4, 5], weight_version="3"), 2) == [2, 2]


@pytest.mark.parametrize("ends", [(0, 1), (1, 3), (0, 3)])
def test_spans_must_cover_the_output(ends: tuple[int, int]) -> None:
    spans = [{"version": "1", "start": ends[0], "end": ends[1]}]
    with pytest.raises(InvariantError, match="cover"):
        wire.token_versions(answer([4, 5], weight_versions=spans), 0)


@pytest.mark.parametrize(
    "pairs",
    [[], [[-0.5, 4, None]], [[-0.5, 5, None], [-0.5, 4, None]], [[-0.5, 4, None], [None, 5, ""]]],
)
def test_logprobs_must_belong_to_the_ids(pairs: list[object]) -> None:
    with pytest.raises(InvariantError, match="logprobs"):
        wire.token_logprobs(answer([4, 5], output_token_logprobs=pairs))


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
def test_error_messages_of_all_shapes(raw: bytes, text: str) -> None:
    assert wire.error_message(400, raw) == f"HTTP 400: {text}"
