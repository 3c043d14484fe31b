"""The policy loss: decoupled PPO with its clips, as a weighted sum over loss tokens.

Here as a pure function, so that it can be checked against hand-made tables. N = loss tokens.
"""

from __future__ import annotations

import torch

from arealite.api.algorithm import LossConfig
from arealite.api.engine import LossFn, LossInput

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped here: exp of more is inf, and inf · 0 would make a gradient NaN."""


def make_policy_loss(config: LossConfig) -> LossFn:
    """Return −w · min(uA, clip(u, 1 − eps_low, 1 + eps_high) A), summed with `loss_weight`.

    Decoupled (arXiv 2505.24298 eq. 5): u = π_θ/π_prox, w = min(π_prox/π_behav, cap), no gradient
    through w. Coupled (arXiv 1707.06347): u = π_θ/π_behav, w = 1. Dual clip (arXiv 1912.09729):
    for A < 0 the term is at most c·|A|. Reads the fields behav_logprobs, prox_logprobs, advantages
    and loss_weight, each float32 [N].
    """

    def loss_fn(batch: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        weight_N = batch.fields["loss_weight"]
        advantages_N = batch.fields["advantages"]
        prox_N, behav_N = batch.fields["prox_logprobs"], batch.fields["behav_logprobs"]
        old_N = prox_N if config.decoupled else behav_N
        log_ratio_N = (batch.outputs["logprobs"] - old_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio_N = log_ratio_N.exp()
        clipped_N = ratio_N.clamp(1.0 - config.eps_low, 1.0 + config.eps_high)
        terms_N = -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
        if config.dual_clip is not None:
            bounded_N = torch.minimum(terms_N, -config.dual_clip * advantages_N)
            terms_N = torch.where(advantages_N < 0, bounded_N, terms_N)
        # Coupled, the proximal policy is the behaviour policy: a ratio of exp(0).
        raw_N = (old_N - behav_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        cap = config.behav_weight_cap if config.decoupled else None
        behav_weight_N = raw_N if cap is None else raw_N.clamp(max=cap)
        loss = (weight_N * behav_weight_N * terms_N).sum()
        with torch.no_grad():
            values = {
                "ratio": ratio_N,
                "approx_kl": ratio_N - 1.0 - log_ratio_N,
                "clip_frac_low": (ratio_N < 1.0 - config.eps_low) & (advantages_N < 0),
                "clip_frac_high": (ratio_N > 1.0 + config.eps_high) & (advantages_N > 0),
                "entropy": batch.outputs["entropy"],
                "behav_weight": behav_weight_N,
                "behav_weight_sq": behav_weight_N.square(),
                "behav_capped_frac": behav_weight_N < raw_N,
                "prox_behav_abs_diff": (prox_N - behav_N).abs(),
            }
            stats = {name: (weight_N * value_N).sum() for name, value_N in values.items()}
            stats["loss"] = loss.detach()
            stats["weight"] = weight_N.sum()
        return loss, stats

    return loss_fn


def effective_sample_share(stats: dict[str, float]) -> float:
    """Return the effective sample size of the behaviour weights per token, in (0, 1].

    ESS/N = (Σw)² / (N Σw²), from summed stats of a make_policy_loss function.
    """
    square = stats["weight"] * stats["behav_weight_sq"]
    return stats["behav_weight"] ** 2 / square if square > 0 else 1.0
