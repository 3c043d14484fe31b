"""Estimators of KL(policy ‖ reference) from one sampled token.

Apart from the losses, because the same numbers may become rewards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from arealite.api.algorithm import KLEstimator

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped here: exp of more is inf, and inf · 0 would make a gradient NaN."""


def kl_estimate(log_ratio_N: torch.Tensor, kind: KLEstimator) -> torch.Tensor:
    """Estimate from x = log π − log π_ref of tokens sampled from π, float32 [N].

    k1 = x, k2 = ½x², k3 = ρ − 1 − log ρ with ρ = π_ref/π = exp(−x) (Schulman, "Approximating KL
    divergence", 2020). In a loss k1 has a gradient of expectation 0; that of k2 is the KL's.
    """
    if kind == "k1":
        return log_ratio_N
    if kind == "k2":
        return 0.5 * log_ratio_N.square()
    x_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (-x_N).exp() - 1.0 + x_N
