"""DPO variants, Bradley–Terry and cross entropy: values by hand, and a naive implementation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arealite.api.engine import LossInput
from arealite.ext.offline.config import DPOConfig
from arealite.ext.offline.preference import bradley_terry, cross_entropy, dpo_terms, make_dpo_loss

KINDS = ("sigmoid", "hinge", "ipo")


@pytest.mark.parametrize(
    ("settings", "margin", "expected"),
    [
        ({}, 0.0, math.log(2.0)),
        ({"beta": 0.5}, 2.0, math.log(1.0 + math.exp(-1.0))),
        ({"beta": 0.5, "label_smoothing": 0.25}, 2.0, math.log(1.0 + math.exp(-1.0)) + 0.25),
        ({"loss": "hinge", "beta": 0.5}, 1.0, 0.5),
        ({"loss": "hinge", "beta": 0.5}, 4.0, 0.0),
        ({"loss": "hinge", "beta": 0.5, "label_smoothing": 0.25}, 4.0, 0.75),
        ({"loss": "ipo", "beta": 0.5}, 0.0, 1.0),
        ({"loss": "ipo", "beta": 0.25}, 2.0, 0.0),
        ({"loss": "ipo", "beta": 0.25, "label_smoothing": 0.25}, 2.0, 4.0),
    ],
)
def test_dpo_terms_match_values_by_hand(
    settings: dict[str, Any], margin: float, expected: float
) -> None:
    # σ: −(1−ε) log σ(x) − ε log σ(−x) = log(1 + e⁻ˣ) + εx.
    found = dpo_terms(torch.tensor([margin], dtype=torch.float64), DPOConfig(**settings))
    assert found.item() == pytest.approx(expected, rel=1e-12)


def test_dpo_terms_are_finite_for_huge_margins() -> None:
    margins = torch.tensor([-1e5, 1e5], requires_grad=True)
    dpo_terms(margins, DPOConfig(beta=1.0)).sum().backward()
    assert margins.grad is not None and margins.grad.tolist() == [-1.0, 0.0]


def naive_pair(
    config: DPOConfig, chosen: list[tuple[float, float]], rejected: list[tuple[float, float]]
) -> float:
    """Return the loss of one pair of lists of (logprob, reference logprob), in float64."""

    def score(tokens: list[tuple[float, float]]) -> float:
        terms = [p - (0.0 if config.reference_free else ref) for p, ref in tokens]
        return sum(terms) / (len(terms) if config.loss == "ipo" else 1)

    def of(h: float) -> float:
        if config.loss == "sigmoid":
            x = config.beta * h
            return math.log1p(math.exp(-abs(x))) + max(-x, 0.0)
        if config.loss == "hinge":
            return max(0.0, 1.0 - config.beta * h)
        return (h - 1.0 / (2.0 * config.beta)) ** 2

    h = score(chosen) - score(rejected)
    return (1.0 - config.label_smoothing) * of(h) + config.label_smoothing * of(-h)


def flat(
    answers: list[list[tuple[float, float]]], weights: list[float], name: str = "logprobs"
) -> tuple[LossInput, torch.Tensor]:
    """Return answers as a micro-batch, and its logprobs with requires_grad."""
    tokens = [token for answer in answers for token in answer]
    rows = [row for row, answer in enumerate(answers) for _ in answer]
    values = torch.tensor([p for p, _ in tokens], dtype=torch.float64, requires_grad=True)
    fields = {
        "ref_logprobs": torch.tensor([ref for _, ref in tokens], dtype=torch.float64),
        "loss_weight": torch.tensor([weights[row] for row in rows], dtype=torch.float64),
    }
    return LossInput(outputs={name: values}, rows_N=torch.tensor(rows), fields=fields), values


TOKEN = st.tuples(st.floats(-5.0, 0.0), st.floats(-5.0, 0.0))
ANSWER = st.lists(TOKEN, min_size=1, max_size=5)
PAIRS = st.lists(st.tuples(ANSWER, ANSWER), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    pairs=PAIRS,
    kind=st.sampled_from(KINDS),
    smoothing=st.sampled_from([0.0, 0.2]),
    free=st.booleans(),
)
def test_dpo_loss_agrees_with_the_naive_implementation(
    pairs: list[Any], kind: Any, smoothing: float, free: bool
) -> None:
    config = DPOConfig(beta=0.3, loss=kind, label_smoothing=smoothing, reference_free=free)
    weights = [0.1 + row // 2 for row in range(2 * len(pairs))]
    batch, logprobs = flat([answer for pair in pairs for answer in pair], weights)
    loss, stats = make_dpo_loss(config)(batch)
    naive = [naive_pair(config, *pair) for pair in pairs]
    expected = sum(w * value for w, value in zip(weights[::2], naive, strict=True))
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert stats["loss"].item() == loss.item()
    # Compare the gradient at the first token with a difference quotient of the naive version.
    loss.backward()
    (chosen, rejected), h = pairs[0], 1e-6
    moved = [
        naive_pair(config, [(chosen[0][0] + sign * h, chosen[0][1]), *chosen[1:]], rejected)
        for sign in (1, -1)
    ]
    assert logprobs.grad is not None
    if kind != "hinge" or abs(moved[0] - 2 * naive[0] + moved[1]) < 1e-12:  # not at the kink
        slope = weights[0] * (moved[0] - moved[1]) / (2 * h)
        assert logprobs.grad[0].item() == pytest.approx(slope, rel=1e-4, abs=1e-6)


def test_dpo_stats_match_values_by_hand() -> None:
    answers = [[(-1.0, -2.0)], [(-3.0, -2.0)], [(-2.0, -1.0), (-2.0, -1.0)], [(-1.0, -1.0)]]
    batch, _ = flat(answers, [0.5] * 4)
    _, stats = make_dpo_loss(DPOConfig(beta=0.5))(batch)
    found = {name: value.item() for name, value in stats.items()}
    # Margins 2 and −2: half of the pairs are right; rewards are β times the log-ratios.
    assert found["accuracy"] == 0.5 and found["margin"] == 0.0
    assert found["chosen"] == pytest.approx(0.5 * (0.5 * 1.0 + 0.5 * -2.0))
    assert found["rejected"] == pytest.approx(0.5 * (0.5 * -1.0))


def test_bradley_terry_matches_values_by_hand() -> None:
    scores = [[(1.0, 0.0)], [(0.0, 0.0)], [(0.5, 0.0)], [(2.5, 0.0)]]
    batch, values = flat(scores, [0.25, 0.25, 0.75, 0.75], "values")
    loss, stats = bradley_terry(batch)
    expected = 0.25 * math.log(1 + math.exp(-1.0)) + 0.75 * math.log(1 + math.exp(2.0))
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert stats["accuracy"].item() == 0.25 and stats["margin"].item() == 0.25 - 1.5
    loss.backward()
    slope = -0.25 / (1 + math.exp(1.0))
    assert values.grad is not None
    assert values.grad[:2].tolist() == pytest.approx([slope, -slope])


def test_cross_entropy_is_a_weighted_sum() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -4.0], requires_grad=True)
    fields = {
        "loss_weight": torch.tensor([0.5, 0.25, 0.25]),
        "is_answer": torch.tensor([1.0, 1.0, 0.0]),
    }
    outputs = {"logprobs": logprobs, "entropy": torch.tensor([1.0, 2.0, 2.0])}
    loss, stats = cross_entropy(
        LossInput(outputs=outputs, rows_N=torch.zeros(3, dtype=torch.int64), fields=fields)
    )
    assert loss.item() == 2.0
    found = {name: value.item() for name, value in stats.items()}
    assert found == {"loss": 2.0, "answer": 1.0, "next_state": 1.0, "entropy": 1.5}
    loss.backward()
    assert logprobs.grad is not None and np.allclose(logprobs.grad, [-0.5, -0.25, -0.25])
