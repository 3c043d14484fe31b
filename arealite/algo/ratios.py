"""Bounds of probability ratios, which the losses and score centering share."""

from torch import Tensor

from arealite.api.algorithm import LossConfig

MAX_LOG_RATIO = 20.0
"""Bound of log-ratios. exp of larger values may be inf, and inf · 0 would make gradients NaN."""


def clamped_exp(log_ratios: Tensor) -> Tensor:
    """Return exp of log-ratios within ±MAX_LOG_RATIO."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def capped_weight(config: LossConfig, raw_weights: Tensor) -> Tensor:
    """Return behaviour weights: truncated at the cap, or 0 outside [1/cap, cap]."""
    cap = config.behav_weight_cap
    if cap is None:
        return raw_weights
    if config.behav_weight == "truncate":
        return raw_weights.clamp(max=cap)
    return raw_weights * in_interval(raw_weights, cap)


def in_interval(raw_weights: Tensor, cap: float) -> Tensor:
    """Return 1 for weights in [1/cap, cap], else 0."""
    is_inside = (raw_weights <= cap) & (raw_weights >= 1.0 / cap)
    return is_inside.to(raw_weights.dtype)
