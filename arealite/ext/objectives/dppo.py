"""DPPO: a trust region of the policy's divergence, in place of PPO's clip of the ratio.

Source: arXiv 2602.04879. Equation 11 maximizes M·r·A with r = π/μ, where μ is the policy that
sampled. Equation 12 sets M = 0 if the divergence D(μ ‖ π) is above δ and the update would increase
it: A > 0 and r > 1, or A < 0 and r < 1. Else M = 1. The divergence is binary: between the sampled
token and all others (equations 13 and 14). δ is `eps_high` for A > 0 and `eps_low` else.

Like the authors' code, the term truncates r at a large bound, and has the gradient of log π.
"""

from collections.abc import Callable

from torch import Tensor

from arealite.api.algorithm import LossConfig

MAX_RATIO = 20.0
"""Bound of the ratio of the authors' code. A small bound removes the gradient of rare tokens."""
LEAST_PROB = 1e-8
"""Least probability of the other tokens in the KL divergence."""


def dppo_tv(
    config: LossConfig, ratio_N: Tensor, logprobs_N: Tensor, advantages_N: Tensor
) -> Tensor:
    """Return −M·sg(r)·A·log π, with D = |μ − π|, the total variation."""
    return _terms(_total_variation, config, ratio_N, logprobs_N, advantages_N)


def dppo_kl(
    config: LossConfig, ratio_N: Tensor, logprobs_N: Tensor, advantages_N: Tensor
) -> Tensor:
    """Return −M·sg(r)·A·log π, with D = μ·log(μ/π) + (1 − μ)·log((1 − μ)/(1 − π))."""
    return _terms(_binary_kl, config, ratio_N, logprobs_N, advantages_N)


def _terms(
    divergence: Callable[[Tensor, Tensor, Tensor], Tensor],
    config: LossConfig,
    ratio_N: Tensor,
    logprobs_N: Tensor,
    advantages_N: Tensor,
) -> Tensor:
    ratio_N = ratio_N.detach()
    policy_N = logprobs_N.detach().exp()
    behaviour_N = policy_N / ratio_N
    divergence_N = divergence(ratio_N, behaviour_N, policy_N)
    is_high_N = (advantages_N > 0) & (ratio_N > 1) & (divergence_N > config.eps_high)
    is_low_N = (advantages_N < 0) & (ratio_N < 1) & (divergence_N > config.eps_low)
    weights_N = ratio_N.clamp(max=MAX_RATIO).masked_fill(is_high_N | is_low_N, 0.0)
    return -weights_N * advantages_N * logprobs_N


def _total_variation(_: Tensor, behaviour_N: Tensor, policy_N: Tensor) -> Tensor:
    return (policy_N - behaviour_N).abs()


def _binary_kl(ratio_N: Tensor, behaviour_N: Tensor, policy_N: Tensor) -> Tensor:
    other_behaviour_N = (1.0 - behaviour_N).clamp(min=LEAST_PROB)
    other_policy_N = (1.0 - policy_N).clamp(min=LEAST_PROB)
    other_log_ratio_N = other_behaviour_N.log() - other_policy_N.log()
    return other_behaviour_N * other_log_ratio_N - behaviour_N * ratio_N.log()
