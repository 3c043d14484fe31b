"""Computes the advantages of a batch from rewards and model outputs, and then its minibatches.

Each rank computes one number for each of its trajectories. All ranks exchange these numbers and sum
them in the order of the headers, so that no result depends on the number of ranks. Shape letters:
T = tokens of one row, N = tokens that the policy sampled in one trajectory.
"""

import math
from collections.abc import Sequence as Seq

import numpy as np
import torch

from arealite.algo import advantages as algo
from arealite.algo.losses import kl_estimate
from arealite.api.algorithm import ShapingConfig
from arealite.api.trainer import PPOConfig
from arealite.impl.trainer.batch import Minibatch, TrainBatch, Trajectory
from arealite.impl.trainer.world import World


def compute_advantages(batch: TrainBatch, config: PPOConfig, world: World) -> list[Minibatch]:
    """Set the field `advantages` of the rows; return the minibatches.

    The rows must have prox_logprobs, and ref_logprobs and values if the config needs them. With a
    critic the rows also get `returns`, with M2PO also `keep`. The minibatches exclude trajectories
    whose gradient is 0 on every token.
    """
    advantages: Seq[np.ndarray | float]
    if config.advantage.is_relative:
        advantages = _group_advantages(batch, config, world)
    else:
        advantages = [_token_advantages(batch, each, config) for each in batch.local]
    if config.advantage.normalize:
        advantages = _normalized(batch, world, advantages, eps=config.advantage.eps)
    for trajectory, advantages_N in zip(batch.local, advantages, strict=True):
        trajectory.scatter("advantages", advantages_N)
    if config.loss.m2_threshold is not None:
        _mask_outliers(batch, world, config.loss.m2_threshold)
    return batch.minibatches(with_gradient(batch, config, world, advantages))


def _group_advantages(batch: TrainBatch, config: PPOConfig, world: World) -> list[float]:
    """Return one advantage for each local trajectory: its reward compared with its group."""
    rewards = [header.reward for header in batch.headers]
    if config.reward != ShapingConfig() or _has_kl_reward(config):
        shaped = [float(_rewards(batch, each, config).sum()) for each in batch.local]
        pairs = zip(batch.local, shaped, strict=True)
        batch.scores = [score for trajectory, score in pairs if trajectory.is_scored]
        pairs = zip(batch.headers, _from_all_ranks(batch, world, shaped), strict=True)
        rewards = [None if header.reward is None else score for header, score in pairs]
    groups = [(header.group_id, header.seat) for header in batch.headers]
    kind = config.advantage.type
    eps = config.advantage.eps
    advantages = algo.group_advantages(rewards, groups, kind=kind, eps=eps)
    return [advantages[each.index] for each in batch.local]


def _token_advantages(batch: TrainBatch, trajectory: Trajectory, config: PPOConfig) -> np.ndarray:
    """Return advantages [N] from the returns over the sampled tokens; 0 if unscored."""
    if not trajectory.is_scored:
        trajectory.scatter("returns", 0.0)
        return np.zeros(np.count_nonzero(np.concatenate(trajectory.sampled)))
    rewards_N = _rewards(batch, trajectory, config)
    options = config.advantage
    gamma = options.gamma
    lam = options.gae_lambda
    batch.scores.append(float(rewards_N.sum()))
    if options.type == "reinforce":
        return algo.discounted_returns(rewards_N, gamma=gamma)
    values_N = trajectory.gather("values")
    last = trajectory.bootstrap
    advantages_N, returns_N = algo.gae(rewards_N, values_N, bootstrap=last, gamma=gamma, lam=lam)
    trajectory.scatter("returns", returns_N)
    return advantages_N


def _rewards(batch: TrainBatch, trajectory: Trajectory, config: PPOConfig) -> np.ndarray:
    """Return the shaped reward of each sampled token, float64 [N]."""
    shaping = config.reward
    rewards_N = algo.shape_rewards(trajectory.rewards_N, shaping)
    if (buffer := shaping.overlong_buffer) > 0:
        limit = config.collector.sampling.max_new_tokens
        most = shaping.overlong_penalty
        for last, length in trajectory.turns():
            cost = algo.overlong_penalty(length, limit=limit, buffer=buffer, penalty=most)
            rewards_N[last] -= cost
    if _has_kl_reward(config):
        log_ratio_N = trajectory.gather("prox_logprobs") - trajectory.gather("ref_logprobs")
        kl_N = kl_estimate(torch.from_numpy(log_ratio_N), config.kl.estimator)
        rewards_N -= config.kl.coef * kl_N.numpy()
    return rewards_N


def _has_kl_reward(config: PPOConfig) -> bool:
    return config.kl.coef > 0 and config.kl.place == "reward"


def _normalized(
    batch: TrainBatch, world: World, advantages: Seq[np.ndarray | float], *, eps: float
) -> list[np.ndarray | float]:
    """Return advantages of mean 0 and standard deviation 1 over the batch's sampled tokens.

    Unscored trajectories keep the advantage 0, and do not count.
    """
    counts = [0 if h.reward is None else h.trained_tokens for h in batch.headers]
    pairs = zip(batch.local, advantages, strict=True)
    by_token = [
        np.broadcast_to(advantage if each.is_scored else 0.0, counts[each.index])
        for each, advantage in pairs
    ]
    count = max(sum(counts), 1)
    mean = math.fsum(_from_all_ranks(batch, world, [float(a_N.sum()) for a_N in by_token])) / count
    centred = [a_N - mean for a_N in by_token]
    squares = [float(np.square(a_N).sum()) for a_N in centred]
    square = math.fsum(_from_all_ranks(batch, world, squares))
    scale = math.sqrt(square / count) + eps or 1.0
    pairs = zip(batch.local, centred, strict=True)
    return [a_N / scale if each.is_scored else 0.0 for each, a_N in pairs]


def _mask_outliers(batch: TrainBatch, world: World, threshold: float) -> None:
    """Set the field `keep` of the rows: 0 for the most off-policy tokens of the whole batch."""
    ends = np.cumsum([header.trained_tokens for header in batch.headers])
    squares = np.zeros(int(ends[-1]))
    local = list[np.ndarray]()
    for each in batch.local:
        squares_N = np.square(each.gather("prox_logprobs") - each.gather("behav_logprobs"))
        squares_N[~each.trained_N] = -1.0
        squares[ends[each.index] - len(squares_N) : ends[each.index]] = squares_N
        local.append(squares_N)
    squares = world.add(squares)
    limit = algo.m2_threshold(squares[squares >= 0.0], threshold)
    for each, squares_N in zip(batch.local, local, strict=True):
        each.scatter("keep", squares_N <= limit)


def with_gradient(
    batch: TrainBatch, config: PPOConfig, world: World, advantages: Seq[np.ndarray | float]
) -> set[int]:
    """Return the indices of scored trajectories with a gradient, from advantage or other terms."""
    in_loss = config.kl.coef > 0 and config.kl.place == "loss"
    if in_loss or config.loss.entropy_coef or config.advantage.type == "gae":
        return {i for i, header in enumerate(batch.headers) if header.reward is not None}
    largest = [float(np.abs(advantage).max()) for advantage in advantages]
    return {i for i, peak in enumerate(_from_all_ranks(batch, world, largest)) if peak != 0.0}


def _from_all_ranks(batch: TrainBatch, world: World, values: Seq[float]) -> list[float]:
    """Return one number for every trajectory of the batch, from `values` of the local ones."""
    numbers = np.zeros(len(batch.headers))
    numbers[[each.index for each in batch.local]] = values
    return world.add(numbers).tolist()
