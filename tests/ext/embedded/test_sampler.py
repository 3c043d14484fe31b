"""Sampling: top_k and top_p limit the tokens; log-probabilities ignore both."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from arealite.ext.embedded.generation import Generation, SamplingParams
from arealite.ext.embedded.token_sampler import BLOCK, draw, settings_of

PROBS = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])


def drawn(count: int, **sampling: Any) -> tuple[set[int], torch.Tensor, torch.Tensor]:
    """Draw `count` tokens under one setting: (tokens seen, tokens, log-probabilities)."""
    params = SamplingParams(**sampling)
    rows = [
        Generation(rid=str(i), prompt=[1], sampling=params, limit=1, stops=frozenset())
        for i in range(count)
    ]
    settings = settings_of(rows, vocab_size=5, device="cpu")
    logits = PROBS.log().expand(count, -1).clone()
    tokens, logprobs, *_ = draw(logits, settings, torch.Generator().manual_seed(0))
    return set(tokens.tolist()), tokens, logprobs


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 50}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.5}, {0, 1}),
        ({"top_p": 0.39}, {0}),
        ({"top_p": 0.8, "top_k": 4}, {0, 1, 2}),
        ({"top_k": 1}, {0}),
        ({"min_p": 0.5}, {0, 1}),
        ({"min_p": 0.2, "top_k": 4, "top_p": 0.8}, {0, 1, 2}),
        ({"temperature": 0.0}, {0}),
        ({"temperature": 0.0, "top_p": 0.01}, {0}),
    ],
)
def test_top_k_and_top_p_limit_the_sampled_tokens(sampling: dict[str, Any], kept: set[int]) -> None:
    seen, tokens, logprobs = drawn(2000, **sampling)
    assert seen == kept
    torch.testing.assert_close(logprobs, PROBS.log()[tokens])


def test_logprobs_include_temperature() -> None:
    _, tokens, logprobs = drawn(50, temperature=0.5, top_k=3)
    expected = torch.log_softmax(PROBS.log() / 0.5, dim=-1)
    torch.testing.assert_close(logprobs, expected[tokens])


def test_top_k_of_one_row_does_not_change_other_rows() -> None:
    params = [SamplingParams(top_k=1), SamplingParams(), SamplingParams(temperature=0.0)]
    rows = [
        Generation(rid=str(i), prompt=[1], sampling=params[i % 3], limit=1, stops=frozenset())
        for i in range(3000)
    ]
    settings = settings_of(rows, vocab_size=5, device="cpu")
    logits = PROBS.log().expand(3000, -1).clone()
    tokens, *_ = draw(logits, settings, torch.Generator().manual_seed(0))
    assert set(tokens[0::3].tolist()) == set(tokens[2::3].tolist()) == {0}
    shares = torch.bincount(tokens[1::3], minlength=5) / 1000
    torch.testing.assert_close(shares, PROBS, atol=0.05, rtol=0)


@pytest.mark.parametrize("size", [BLOCK, 2 * BLOCK, 300])
def test_logprobs_ignore_filters_if_the_vocabulary_fills_whole_blocks(size: int) -> None:
    params = [SamplingParams(top_k=3), SamplingParams(temperature=0.0, top_k=1)]
    rows = [
        Generation(rid=str(i), prompt=[1], sampling=params[i % 2], limit=1, stops=frozenset())
        for i in range(200)
    ]
    settings = settings_of(rows, vocab_size=size, device="cpu")
    logits = torch.linspace(0, 3, size).expand(200, -1).clone()
    logits[:, 5] = logits[:, -1]  # a tie: one of both is the greedy token
    expected = logits.log_softmax(-1)
    tokens, logprobs, *_ = draw(logits, settings, torch.Generator().manual_seed(0))
    assert set(tokens.tolist()) == {5, size - 1, size - 2}
    torch.testing.assert_close(logprobs, expected.gather(1, tokens[:, None])[:, 0])


def test_tokens_of_a_large_vocabulary_are_drawn_in_proportion() -> None:
    size, count = 2 * BLOCK + 5, 20_000
    probs = torch.zeros(size, dtype=torch.float64)
    likely = [0, 3, BLOCK - 1, BLOCK, 2 * BLOCK + 4]
    probs[likely] = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25], dtype=torch.float64)
    rows = [
        Generation(rid=str(i), prompt=[1], sampling=SamplingParams(), limit=1, stops=frozenset())
        for i in range(count)
    ]
    settings = settings_of(rows, vocab_size=size, device="cpu")
    logits = probs.log().float().expand(count, -1).clone()
    tokens, *_ = draw(logits, settings, torch.Generator().manual_seed(0))
    shares = torch.bincount(tokens, minlength=size) / count
    torch.testing.assert_close(shares, probs.float(), atol=0.015, rtol=0)
    assert set(tokens.tolist()) == set(likely)  # no other token, however many there are


def test_row_that_is_not_finite_gets_a_token_and_no_logprob() -> None:
    rows = [
        Generation(rid=str(i), prompt=[1], sampling=SamplingParams(), limit=1, stops=frozenset())
        for i in range(2)
    ]
    logits = torch.randn(2, 300)
    logits[1, 7] = torch.nan
    settings = settings_of(rows, vocab_size=300, device="cpu")
    tokens, logprobs, *_ = draw(logits, settings, torch.Generator().manual_seed(0))
    assert tokens.max() < 300
    assert logprobs.isfinite().tolist() == [True, False]
