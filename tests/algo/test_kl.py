"""KL estimators: exact expectations over a small vocabulary."""

from __future__ import annotations

import math

import pytest
import torch

from arealite.algo.losses import MAX_LOG_RATIO, kl_estimate
from arealite.api.algorithm import KLEstimator

REFERENCE = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
LOGITS = torch.tensor([0.3, -0.4, 0.1], dtype=torch.float64)


def expectation(kind: KLEstimator) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Return E[estimate], E[∂estimate/∂logits], and KL's own gradient, under the policy."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    chances = logprobs.exp().detach()
    estimates = kl_estimate(logprobs - REFERENCE.log(), kind)
    (gradient,) = torch.autograd.grad((chances * estimates).sum(), logits, retain_graph=True)
    whole = (logprobs.exp() * (logprobs - REFERENCE.log())).sum()
    (wanted,) = torch.autograd.grad(whole, logits)
    return float((chances * estimates).sum().detach() - whole.detach()), gradient, wanted


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind: KLEstimator) -> None:
    assert expectation(kind)[0] == pytest.approx(0.0, abs=1e-12)


def test_expected_gradient_of_k1_is_zero_and_of_k2_is_that_of_the_kl() -> None:
    _, gradient, wanted = expectation("k1")
    assert gradient.abs().max() < 1e-12
    assert wanted.abs().max() > 0.01
    _, gradient, wanted = expectation("k2")
    assert (gradient - wanted).abs().max() < 1e-12


def test_k3_is_finite_for_extreme_ratios() -> None:
    far = torch.tensor([-200.0, 200.0], requires_grad=True)
    estimates = kl_estimate(far, "k3")
    assert float(estimates[0].detach()) == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-5)
    estimates.sum().backward()
    assert far.grad is not None
    assert far.grad.tolist() == [0.0, 0.0]
