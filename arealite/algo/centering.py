"""Score centering: the sampler's expected gradient is subtracted from the gradient of each token.

Source: arXiv 2609.20807. The gradient of a token y is −A·w(y)·∇log π(y), with the advantage A and a
weight w that is part of the objective. If y is drawn from q, its expectation is
−A·Σ_y q(y)·w(y)·∇log π(y). For w = π/q this is 0. For q ≠ π and any other w, it pulls the policy
towards the sampler, in each step, whatever the reward is. The term A·C of a token has the opposite
gradient, so that only the covariance of reward and score is left:

    C = Σ_H sg(m − α·π)·log π,  m = q·w(π/q),  α = ρ·w(1/ρ),  ρ = (1 − Σ_H q) / (1 − Σ_H π)

H are the ids whose probabilities the sampler recorded. Outside H, q is taken as ρ·π. There, the sum
of π·∇log π is minus the sum over H, which gives the part with α. Examples: without a weight, m = q
and α = ρ; with w = min(π/q, c), m = min(π, c·q) and α = min(1, c·ρ).

Shapes: N = loss tokens of a micro-batch, K = ids of H, M = K + 1: H, then the tail as one more id.
"""

import torch
from torch import Tensor

from arealite.algo.ratios import capped_weight, clamped_exp
from arealite.api.algorithm import LossConfig, Objective
from arealite.api.engine import LossInput

LEAST_TAIL = 1e-6
"""Least probability of the policy's tail: the denominator of ρ."""


def centering_terms(
    config: LossConfig,
    objective: Objective,
    batch: LossInput,
    *,
    log_ratio_N: Tensor,
    behav_weight_N: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return A·C of each token with a gradient, and stats, float [N] each.

    The weight w is that of the options: the derivative of the objective with respect to log π,
    times the behaviour weight, both evaluated for each id of H as if it had been sampled. So an id
    that the objective would clip or mask has no part in the expectation. A ratio or a weight of a
    whole row counts as a constant of its tokens.

    Args:
        config: Options of the policy loss.
        objective: The objective that they name.
        batch: Needs the output top_logprobs and the field behav_top_logprobs, [N, K] each. The
            field prox_top_logprobs is optional: without it, the proximal policy is the current one.
        log_ratio_N: Log-ratio of the sampled tokens.
        behav_weight_N: Behaviour weight of the sampled tokens, 0 where they are masked; None: 1.
    """
    fields = batch.fields
    top_logprobs_NK = batch.outputs["top_logprobs"]
    behav_NM = _with_tail(fields["behav_top_logprobs"], least=0.0)
    policy_NM = _with_tail(top_logprobs_NK.detach(), least=LEAST_TAIL)
    prox_NM = policy_NM
    if "prox_top_logprobs" in fields:
        prox_NM = _with_tail(fields["prox_top_logprobs"], least=LEAST_TAIL)
    old_NM = prox_NM if config.decoupled else behav_NM
    row_log_ratio_N = log_ratio_N.detach() if config.ratio == "sequence" else None
    slopes_NM = _slopes(
        config,
        objective,
        policy_NM,
        policy_NM - old_NM,
        advantages_N=fields["advantages"],
        row_log_ratio_N=row_log_ratio_N,
    )
    if behav_weight_N is not None:
        weights_NM = behav_weight_N[:, None]
        if config.behav_weight_level == "token":
            weights_NM = capped_weight(config, clamped_exp(prox_NM - behav_NM))
        slopes_NM = slopes_NM * weights_NM
    policy_probs_NM = policy_NM.exp()
    behav_probs_NM = behav_NM.exp()
    expected_NM = behav_probs_NM * slopes_NM
    tail_factor_N1 = expected_NM[:, -1:] / policy_probs_NM[:, -1:]
    coefs_NK = tail_factor_N1 * policy_probs_NM[:, :-1] - expected_NM[:, :-1]
    terms_N = (coefs_NK * top_logprobs_NK).sum(-1)
    stats = {
        "centering_abs": terms_N.detach().abs(),
        "centering_tail": behav_probs_NM[:, -1],
        "centering_rho": behav_probs_NM[:, -1] / policy_probs_NM[:, -1],
    }
    return terms_N, stats


def _with_tail(logprobs_NK: Tensor, *, least: float) -> Tensor:
    """Return logprobs [N, M]: the given ones, then that of all other ids, at least log `least`."""
    tail_N1 = 1.0 - logprobs_NK.exp().sum(-1, keepdim=True)
    return torch.cat([logprobs_NK, tail_N1.clamp(min=least).log()], dim=-1)


def _slopes(
    config: LossConfig,
    objective: Objective,
    logprobs_NM: Tensor,
    log_ratios_NM: Tensor,
    *,
    advantages_N: Tensor,
    row_log_ratio_N: Tensor | None,
) -> Tensor:
    """Return the derivative of the objective's term with respect to log π, −A·w, of each id.

    Args:
        config: Options of the policy loss.
        objective: The objective.
        logprobs_NM: log π of each id.
        log_ratios_NM: Log-ratio of each id.
        advantages_N: Advantage of each token.
        row_log_ratio_N: Log-ratio of each token's row, which replaces those of the ids; or None.
    """
    if row_log_ratio_N is not None:
        log_ratios_NM = row_log_ratio_N[:, None].expand_as(logprobs_NM)
    num_ids = logprobs_NM.shape[1]
    with torch.enable_grad():
        changes_NM = torch.zeros_like(logprobs_NM, requires_grad=True)  # of log π
        ratios_NM = clamped_exp(log_ratios_NM + changes_NM)
        terms = objective(
            config,
            ratios_NM.flatten(),
            (logprobs_NM + changes_NM).flatten(),
            advantages_N.repeat_interleave(num_ids),
        )
        return torch.autograd.grad(terms.sum(), changes_NM)[0]
