"""Policy objectives besides PPO's: the term of each loss token (see api/algorithm.py)."""

import torch

from arealite.algo.losses import clipped
from arealite.api.algorithm import LossConfig


def cispo(
    config: LossConfig,
    ratio_N: torch.Tensor,
    logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
) -> torch.Tensor:
    """Return −clip(u)·A·log π of each token, without a gradient through clip(u).

    Source: arXiv 2506.13585 eq. 4.
    """
    return -clipped(config, ratio_N).detach() * advantages_N * logprobs_N


def sapo(
    config: LossConfig,
    ratio_N: torch.Tensor,
    _: torch.Tensor,
    advantages_N: torch.Tensor,
) -> torch.Tensor:
    """Return −4/τ·σ(τ(u − 1))·A of each token (arXiv 2511.20347)."""
    tau_N = torch.full_like(advantages_N, config.sapo_tau_neg)
    tau_N = tau_N.masked_fill(advantages_N > 0, config.sapo_tau)
    gate_N = torch.sigmoid(tau_N * (ratio_N - 1.0))
    return -(4.0 / tau_N) * gate_N * advantages_N


def reinforce(
    _config: LossConfig,
    _: torch.Tensor,
    logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
) -> torch.Tensor:
    """Return −A·log π of each token."""
    return -advantages_N * logprobs_N
