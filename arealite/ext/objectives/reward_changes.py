"""Changes of rewards before advantages: shaping, and a KL penalty (hook `reward_change`)."""

from functools import partial

import numpy as np
import torch

from arealite.algo.losses import kl_estimate
from arealite.api.algorithm import KLConfig, ShapingConfig
from arealite.api.hooks import RewardChange
from arealite.api.trainer import PPOConfig
from arealite.impl.trainer.batch import Trajectory


def shaping(config: PPOConfig) -> RewardChange | None:
    """Return what shapes rewards; None if all options of the section have their defaults."""
    if config.reward == ShapingConfig():
        return None
    limit = config.collector.sampling.max_new_tokens
    return partial(_shaped, config.reward, limit)


def kl_penalty(config: PPOConfig) -> RewardChange | None:
    """Return what subtracts the KL penalty from the reward of each token; None: no penalty."""
    if config.kl.coef > 0 and config.kl.place == "reward":
        return partial(_penalized, config.kl)
    return None


def _shaped(
    config: ShapingConfig,
    limit: int,
    trajectory: Trajectory,
    rewards_N: np.ndarray,
) -> np.ndarray:
    """Return shaped rewards, with the penalty for each long turn at its last token."""
    shaped_N = shape_rewards(rewards_N, config)
    if config.overlong_buffer > 0:
        for last, length in trajectory.turns():
            shaped_N[last] -= overlong_penalty(
                length,
                limit=limit,
                buffer=config.overlong_buffer,
                penalty=config.overlong_penalty,
            )
    return shaped_N


def _penalized(config: KLConfig, trajectory: Trajectory, rewards_N: np.ndarray) -> np.ndarray:
    log_ratio_N = trajectory.gather("prox_logprobs") - trajectory.gather("ref_logprobs")
    kl_N = kl_estimate(torch.from_numpy(log_ratio_N), config.estimator)
    return rewards_N - config.coef * kl_N.numpy()


def shape_rewards(rewards_N: np.ndarray, config: ShapingConfig) -> np.ndarray:
    """Scale and clip each reward of an episode, then add the bias to the last; float64 [N]."""
    shaped_N = rewards_N.astype(np.float64) * config.scale
    if config.clip is not None:
        shaped_N = shaped_N.clip(-config.clip, config.clip)
    shaped_N[-1:] += config.bias
    return shaped_N


def overlong_penalty(
    length: int,
    *,
    limit: int,
    buffer: int,
    penalty: float,
) -> float:
    """Return the penalty for a long answer, in [0, penalty] (DAPO, arXiv 2503.14476 eq. 13).

    It is 0 up to limit − buffer tokens and grows linearly to `penalty` at the limit.

    Args:
        length: Tokens of the answer.
        limit: Largest number of tokens of an answer.
        buffer: Number of tokens before the limit over which the penalty grows; 0: no penalty.
        penalty: The largest penalty.
    """
    if buffer <= 0:
        return 0.0
    excess = length - (limit - buffer)
    share = min(max(excess / buffer, 0.0), 1.0)
    return penalty * share
