"""Losses of the protocol, against formulas written out here, in float64."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from arealite.api.engine import LossInput
from arealite.base.errors import UserError
from arealite.ext.tinker.named_losses import (
    HAS_TARGET,
    SEQUENCE_MASK,
    SummedLoss,
    options_of,
)

LOGPROBS = [-0.1, -2.0, -0.7, -1.5]
SAMPLER = [-0.5, -1.0, -0.7, -3.0]
ADVANTAGES = [1.0, -2.0, 0.5, 3.0]
WEIGHTS = [0.0, 1.0, 0.5, 2.0]


def run(name: str, **options: float) -> tuple[float, list[float]]:
    """Return the loss and its gradient by the log-probabilities; the last token has no target."""
    logprobs = torch.tensor(LOGPROBS, dtype=torch.float64, requires_grad=True)
    batch = LossInput(
        outputs={"logprobs": logprobs},
        rows_N=torch.zeros(4, dtype=torch.int64),
        fields={
            "logprobs": torch.tensor(SAMPLER, dtype=torch.float64),
            "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64),
            "weights": torch.tensor(WEIGHTS, dtype=torch.float64),
            HAS_TARGET: torch.tensor([1.0, 1.0, 1.0, 0.0]),
        },
    )
    loss, stats = SummedLoss(name, options_of(name, options), uses_top_ids=False)(batch)
    loss.backward()
    assert stats["loss"].item() == loss.item()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.tolist()


def terms(
    formula: Callable[[float, float, float], tuple[float, float]],
) -> tuple[float, list[float]]:
    """Return the sum of the loss terms of (p, q, A), and their derivatives."""
    pairs = [formula(*values) for values in zip(LOGPROBS, SAMPLER, ADVANTAGES, strict=True)][:3]
    return sum(loss for loss, _ in pairs), [slope for _, slope in pairs] + [0.0]


def check(found: tuple[float, list[float]], expected: tuple[float, list[float]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    assert np.allclose(found[1], expected[1], rtol=1e-12, atol=1e-15)


def test_cross_entropy_is_the_weighted_sum() -> None:
    expected = 1.0 * 2.0 + 0.5 * 0.7

    check(run("cross_entropy"), (expected, [0.0, -1.0, -0.5, 0.0]))


def test_importance_sampling_weighs_by_the_ratio_with_its_gradient() -> None:
    def formula(p: float, q: float, advantage: float) -> tuple[float, float]:
        ratio = math.exp(p - q)
        return -ratio * advantage, -ratio * advantage

    check(run("importance_sampling"), terms(formula))


@pytest.mark.parametrize("options", [{}, {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1}])
def test_ppo_takes_the_lower_of_ratio_and_clipped_ratio(options: dict[str, float]) -> None:
    low = options.get("clip_low_threshold", 0.8)
    high = options.get("clip_high_threshold", 1.2)

    def formula(p: float, q: float, advantage: float) -> tuple[float, float]:
        ratio = math.exp(p - q)
        clipped = min(max(ratio, low), high)
        if ratio * advantage <= clipped * advantage:
            return -ratio * advantage, -ratio * advantage
        return -clipped * advantage, 0.0

    check(run("ppo", **options), terms(formula))


def test_cispo_clips_the_ratio_and_keeps_the_gradient_of_every_token() -> None:
    def formula(p: float, q: float, advantage: float) -> tuple[float, float]:
        clipped = min(max(math.exp(p - q), 0.8), 1.2)
        return -clipped * advantage * p, -clipped * advantage

    check(run("cispo"), terms(formula))


def test_dro_adds_a_square_of_the_difference() -> None:
    def formula(p: float, q: float, advantage: float) -> tuple[float, float]:
        return 0.15 * (p - q) ** 2 - p * advantage, 0.3 * (p - q) - advantage

    check(run("dro", beta=0.3), terms(formula))


def test_gspo_clips_the_mean_ratio_of_the_marked_targets_of_a_datum() -> None:
    """Two data, [token 0] and [tokens 1, 2, and one without a target]; token 1 is not marked."""
    logprobs = torch.tensor(LOGPROBS, dtype=torch.float64, requires_grad=True)
    batch = LossInput(
        outputs={"logprobs": logprobs},
        rows_N=torch.tensor([0, 1, 1, 1]),
        fields={
            "logprobs": torch.tensor([-0.3, -1.0, -0.6, 9.0], dtype=torch.float64),
            "advantages": torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64),
            SEQUENCE_MASK: torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64),
            HAS_TARGET: torch.tensor([1.0, 1.0, 1.0, 0.0]),
        },
    )
    options = options_of("gspo", {"clip_low_threshold": 0.95, "clip_high_threshold": 1.1})

    loss, _ = SummedLoss("gspo", options, uses_top_ids=False)(batch)
    loss.backward()

    # exp(0.2) is above 1.1: token 0 is clipped. exp(-0.1) is below 0.95: token 1 has the lower
    # objective with the clipped ratio, token 2 with its own.
    ratio = math.exp(-0.1)
    assert loss.item() == pytest.approx(-1.1 + 2 * 0.95 - 0.5 * ratio, rel=1e-12)
    assert logprobs.grad is not None
    assert np.allclose(logprobs.grad, [0.0, 0.0, -0.5 * ratio, 0.0], rtol=1e-12)


def test_gspo_of_several_targets_takes_the_mean_of_all_marked_ones() -> None:
    def loss_of(shape: tuple[int, ...]) -> float:
        def of(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float64).reshape(shape)

        batch = LossInput(
            outputs={"logprobs": of(LOGPROBS), "top_logprobs": of(LOGPROBS)},
            rows_N=torch.zeros(shape[0], dtype=torch.int64),
            fields={
                "logprobs": of(SAMPLER),
                "advantages": of(ADVANTAGES),
                SEQUENCE_MASK: of([1.0, 0.0, 1.0, 1.0]),
                HAS_TARGET: of([1.0, 1.0, 1.0, 0.0]),
            },
        )
        loss, _ = SummedLoss("gspo", options_of("gspo", {}), uses_top_ids=len(shape) > 1)(batch)
        return loss.item()

    assert loss_of((2, 2)) == pytest.approx(loss_of((4,)), rel=1e-12)


def test_losses_and_options_that_are_not_here_are_refused() -> None:
    with pytest.raises(UserError, match=r"cross_entropy.*forward_backward_custom"):
        options_of("stable_reinforce", {})
    with pytest.raises(UserError, match=r"loss_fn_config\.beta=1.*options of ppo are: clip_low"):
        options_of("ppo", {"beta": 1.0})
    with pytest.raises(UserError, match="options of cross_entropy are: none"):
        options_of("cross_entropy", {"loss_id": "x"})
