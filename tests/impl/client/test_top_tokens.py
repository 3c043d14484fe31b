"""The record of the most probable tokens, made from rows of servers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.api.llm import LLMResponse, SamplingConfig
from arealite.api.server_protocol import ServerAnswer, TopRow
from arealite.base.errors import InvariantError
from arealite.impl.client.top_tokens import num_requested, resumed_record, top_record

PROBS = [0.4, 0.25, 0.15, 0.12, 0.08]


def row_of(probs: list[float]) -> TopRow:
    """Return the row of a server for tokens 0, 1, 2 …"""
    return [(math.log(prob), token, None) for token, prob in enumerate(probs)]


def answer_of(token: int, row: TopRow | None, prob: float | None = None) -> ServerAnswer:
    logprob = math.log(PROBS[token] if prob is None else prob)
    rows = None if row is None else [row]
    return ServerAnswer(output_ids=[token], logprobs=[logprob], top_tokens=rows)


def record_of(answer: ServerAnswer, **sampling: Any) -> tuple[list[int], list[float], float]:
    """Return the recorded ids, their probabilities, and that of the sampled token."""
    record = top_record(answer, SamplingConfig(**sampling), 64)
    ids = np.frombuffer(record.ids, "<i4").tolist()
    probs = np.exp(np.frombuffer(record.logprobs, "<f4")).tolist()
    return ids, probs, math.exp(record.sampled_logprobs[0])


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({"top_k": 2}, 2),
        ({"top_k": 3}, 3),
        ({"top_p": 0.5}, 2),
        ({"top_p": 0.79}, 3),
        ({"min_p": 0.35}, 3),
        ({"top_k": 3, "min_p": 0.5}, 2),
        ({"top_p": 0.5, "top_k": 3}, 2),
    ],
)
def test_set_is_known_if_the_row_reaches_beyond_it(sampling: dict[str, Any], kept: int) -> None:
    answer = answer_of(0, row_of(PROBS[:4]))
    ids, probs, sampled = record_of(answer, top_logprobs=3, **sampling)
    mass = sum(PROBS[:kept])
    assert ids == [*range(kept), -1, -1, -1][:3]
    assert probs[:kept] == pytest.approx([prob / mass for prob in PROBS[:kept]])
    assert probs[kept:] == [0.0] * (3 - kept)
    assert sampled == pytest.approx(0.4 / mass)


@pytest.mark.parametrize(
    ("probs", "token", "sampling"),
    [
        (PROBS[:3], 0, {"top_p": 0.9}),  # the row ends before the set
        (PROBS[:3], 0, {"top_k": 3}),  # it does not show whether the next token is as probable
        (PROBS[:3], 0, {"min_p": 0.1}),
        ([0.4, 0.2, 0.2, 0.1], 0, {"top_k": 2}),  # a tie
        ([0.5, 0.25, 0.15], 0, {"top_p": 0.5}),  # rounding decides
        ([0.4, 0.2, 0.1], 0, {"min_p": 0.5}),
        (PROBS[:3], 2, {"top_k": 2}),  # the sampled token is outside
        ([0.4, 0.25, 0.15, 0.12], 0, {"top_k": 3, "top_p": 0.7, "min_p": 0.01}),  # two rules differ
    ],
)
def test_set_is_unknown_otherwise(probs: list[float], token: int, sampling: dict[str, Any]) -> None:
    answer = answer_of(token, row_of(probs), probs[token])
    ids, recorded, sampled = record_of(answer, top_logprobs=3, **sampling)
    assert (ids, recorded) == ([-1] * 3, [0.0] * 3)
    assert sampled == pytest.approx(probs[token])  # of the whole vocabulary


def test_row_of_the_whole_vocabulary_shows_the_set() -> None:
    ids, probs, _ = record_of(answer_of(0, row_of(PROBS)), top_logprobs=7, top_k=5)
    assert (ids, sum(probs)) == ([0, 1, 2, 3, 4, -1, -1], pytest.approx(1))


@pytest.mark.parametrize("sampling", [{}, {"top_k": 2, "temperature": 0.0}])
def test_row_is_recorded_as_it_is_without_truncation(sampling: dict[str, Any]) -> None:
    row = [(math.log(0.08), 9, None), *row_of([0.4, 0.25, 0.15])]  # vLLM's sampled token is first
    answer = ServerAnswer(output_ids=[9], logprobs=[math.log(0.08)], top_tokens=[row])
    ids, probs, sampled = record_of(answer, top_logprobs=3, **sampling)
    assert (ids, probs) == ([0, 1, 2], pytest.approx([0.4, 0.25, 0.15]))
    assert sampled == pytest.approx(0.08)


def test_renormalised_rows_are_kept() -> None:
    row = [*row_of([0.6, 0.4]), (None, 5, None), (-9999.0, 6, None)]
    answer = answer_of(0, row, 0.6)
    answer.is_renormalized = True
    ids, probs, sampled = record_of(answer, top_logprobs=4, top_p=0.1)
    assert (ids, probs, sampled) == ([0, 1, -1, -1], pytest.approx([0.6, 0.4, 0, 0]), 0.6)


@pytest.mark.parametrize(
    ("answer", "fix"),
    [
        (answer_of(0, None), "set collector.sampling.top_logprobs=0"),
        (answer_of(0, row_of([0.3, 0.2])), "1 have another logprob than as sampled tokens"),
        (answer_of(0, [(math.log(0.4), 0, None), (-3.0, 64, None)]), "up to id 64"),
    ],
)
def test_answer_without_fitting_rows_is_an_error(answer: ServerAnswer, fix: str) -> None:
    with pytest.raises(InvariantError, match=fix):
        top_record(answer, SamplingConfig(top_logprobs=2), 64)


def test_one_token_more_is_requested_but_never_more_than_the_vocabulary() -> None:
    sampling = SamplingConfig(top_logprobs=20)
    assert [num_requested(sampling, size) for size in (None, 64, 21, 20, 7)] == [21, 21, 21, 20, 7]
    assert num_requested(SamplingConfig(top_k=3), 64) == 0


def test_resumed_tokens_without_rows_get_empty_rows() -> None:
    values: dict[str, Any] = {"logprobs": [-1.0] * 2, "versions": [0] * 2, "stop_reason": ""}
    bare = LLMResponse(output_ids=[5, 6], **values)
    ids, logprobs = resumed_record(bare, 3)
    assert np.frombuffer(ids, "<i4").tolist() == [-1] * 6
    assert np.frombuffer(logprobs, "<f4").tolist() == [-np.inf] * 6
    whole = LLMResponse(output_ids=[5, 6], top_ids=bytes(24), top_logprobs=bytes(24), **values)
    assert resumed_record(whole, 3) == (bytes(24), bytes(24))
    assert resumed_record(whole, 2) == (ids[:16], logprobs[:16])
    assert resumed_record(whole, 0) == (b"", b"")


@given(
    logits=st.lists(st.floats(-4, 4), min_size=6, max_size=12),
    top_k=st.integers(-1, 8),
    top_p=st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    num_top=st.integers(1, 12),
)
def test_known_set_is_sglangs(
    logits: list[float], top_k: int, top_p: float, min_p: float, num_top: int
) -> None:
    probs = np.exp(logits) / np.exp(logits).sum()
    order = np.argsort(-probs)
    ordered = probs[order]
    # As SGLang's top_k_top_p_min_p_sampling_from_probs_torch does it, in float64.
    is_kept = np.arange(len(probs)) < (top_k if top_k > 0 else len(probs))
    is_kept &= ordered.cumsum() - ordered <= top_p
    is_kept &= ordered >= ordered[0] * min_p
    kept = order[is_kept].tolist()
    row = [(math.log(probs[token]), int(token), None) for token in order[: num_top + 1]]
    answer = ServerAnswer(
        output_ids=[kept[0]], logprobs=[math.log(probs[kept[0]])], top_tokens=[row]
    )
    sampling = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    ids, recorded, _ = record_of(answer, top_logprobs=num_top, **sampling)
    tokens = [token for token in ids if token >= 0]
    if not SamplingConfig(**sampling).truncates:
        assert tokens == order[:num_top].tolist()
    elif tokens:
        assert {*tokens} == {*kept[:num_top]}
        assert recorded[: len(tokens)] == pytest.approx(
            (probs[tokens] / probs[kept].sum()).tolist(), rel=1e-4
        )
