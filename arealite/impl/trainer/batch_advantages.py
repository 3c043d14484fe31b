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
from arealite.api.formulas import GroupAdvantage, TokenAdvantage
from arealite.api.trainer import PPOConfig
from arealite.impl.trainer.batch import Minibatch, TrainBatch, Trajectory
from arealite.impl.trainer.rank_group import World


def compute_advantages(
    batch: TrainBatch,
    config: PPOConfig,
    world: World,
) -> list[Minibatch]:
    """Set the field `advantages` of the rows; return the minibatches.

    The rows must have prox_logprobs, and ref_logprobs and values if the config needs them. With a
    critic the rows also get `returns`, with M2PO also `keep`. The minibatches exclude trajectories
    whose gradient is 0 on every token.
    """
    advantages: Seq[np.ndarray | float]
    function = config.advantage.function
    if isinstance(function, TokenAdvantage):
        advantages = [_token_advantages(batch, each, config, function) for each in batch.local]
    else:
        advantages = _group_advantages(batch, config, world, function)
    if config.advantage.normalize:
        advantages = _normalized(batch, world, advantages, eps=config.advantage.eps)
    for trajectory, advantages_N in zip(batch.local, advantages, strict=True):
        trajectory.scatter("advantages", advantages_N)
    if config.loss.m2_threshold is not None:
        _mask_outliers(batch, world, config.loss.m2_threshold)
    return batch.minibatches(with_gradient(batch, config, world, advantages))


def _group_advantages(
    batch: TrainBatch,
    config: PPOConfig,
    world: World,
    compare: GroupAdvantage,
) -> list[float]:
    """Return one advantage for each local trajectory: its reward compared with its group."""
    if config.reward != ShapingConfig() or _has_kl_reward(config):
        rewards = _shaped_rewards(batch, config, world)
    else:
        rewards = [header.reward for header in batch.headers]
    groups = [(header.group_id, header.seat) for header in batch.headers]
    advantages = algo.group_advantages(rewards, groups, compare, config.advantage)
    return [advantages[trajectory.index] for trajectory in batch.local]


def _shaped_rewards(
    batch: TrainBatch,
    config: PPOConfig,
    world: World,
) -> list[float | None]:
    """Return the shaped reward of every trajectory of the batch; None if unscored.

    The rewards of scored local trajectories become the batch's `scores`.
    """
    local_rewards = list[float]()
    scores = list[float]()
    for trajectory in batch.local:
        reward = float(_rewards(batch, trajectory, config).sum())
        local_rewards.append(reward)
        if trajectory.is_scored:
            scores.append(reward)
    batch.scores = scores
    all_rewards = _from_all_ranks(batch, world, local_rewards)
    pairs = zip(batch.headers, all_rewards, strict=True)
    return [None if header.reward is None else reward for header, reward in pairs]


def _token_advantages(
    batch: TrainBatch,
    trajectory: Trajectory,
    config: PPOConfig,
    function: TokenAdvantage,
) -> np.ndarray:
    """Return advantages [N] of the sampled tokens; 0 if unscored."""
    if not trajectory.is_scored:
        trajectory.scatter("returns", 0.0)
        num_sampled = np.count_nonzero(np.concatenate(trajectory.sampled))
        return np.zeros(num_sampled)
    rewards_N = _rewards(batch, trajectory, config)
    batch.scores.append(float(rewards_N.sum()))
    values_N = np.zeros(len(rewards_N))
    if function.has_critic:
        values_N = trajectory.gather("values")
    advantages_N = function.formula(config.advantage, rewards_N, values_N, trajectory.bootstrap)
    if function.has_critic:
        trajectory.scatter("returns", advantages_N + values_N)
    return advantages_N


def _rewards(
    batch: TrainBatch,
    trajectory: Trajectory,
    config: PPOConfig,
) -> np.ndarray:
    """Return the shaped reward of each sampled token, float64 [N]."""
    shaping = config.reward
    rewards_N = algo.shape_rewards(trajectory.rewards_N, shaping)
    if shaping.overlong_buffer > 0:
        for last, length in trajectory.turns():
            rewards_N[last] -= algo.overlong_penalty(
                length,
                limit=config.collector.sampling.max_new_tokens,
                buffer=shaping.overlong_buffer,
                penalty=shaping.overlong_penalty,
            )
    if _has_kl_reward(config):
        log_ratio_N = trajectory.gather("prox_logprobs") - trajectory.gather("ref_logprobs")
        kl_N = kl_estimate(torch.from_numpy(log_ratio_N), config.kl.estimator)
        rewards_N -= config.kl.coef * kl_N.numpy()
    return rewards_N


def _has_kl_reward(config: PPOConfig) -> bool:
    return config.kl.coef > 0 and config.kl.place == "reward"


def _normalized(
    batch: TrainBatch,
    world: World,
    advantages: Seq[np.ndarray | float],
    *,
    eps: float,
) -> list[np.ndarray | float]:
    """Return advantages of mean 0 and standard deviation 1 over the batch's sampled tokens.

    Unscored trajectories keep the advantage 0, and do not count.
    """
    num_tokens = [
        header.trained_tokens if header.reward is not None else 0 for header in batch.headers
    ]
    by_token = list[np.ndarray]()
    for trajectory, advantage in zip(batch.local, advantages, strict=True):
        scored_advantage = advantage if trajectory.is_scored else 0.0
        advantages_N = np.broadcast_to(scored_advantage, num_tokens[trajectory.index])
        by_token.append(advantages_N)
    count = max(sum(num_tokens), 1)

    def mean_over_tokens(local_sums: list[float]) -> float:
        return math.fsum(_from_all_ranks(batch, world, local_sums)) / count

    local_sums = [float(advantages_N.sum()) for advantages_N in by_token]
    mean = mean_over_tokens(local_sums)
    centred = [advantages_N - mean for advantages_N in by_token]
    variance = mean_over_tokens([float(np.square(centred_N).sum()) for centred_N in centred])
    scale = math.sqrt(variance) + eps or 1.0
    pairs = zip(batch.local, centred, strict=True)
    return [centred_N / scale if trajectory.is_scored else 0.0 for trajectory, centred_N in pairs]


def _mask_outliers(batch: TrainBatch, world: World, threshold: float) -> None:
    """Set the field `keep` of the rows: 0 for the most off-policy tokens of the whole batch."""
    ends = np.cumsum([header.trained_tokens for header in batch.headers])
    batch_squares = np.zeros(int(ends[-1]))  # of all sampled tokens, in the headers' order
    local_squares = list[np.ndarray]()
    for trajectory in batch.local:
        log_ratio_N = trajectory.gather("prox_logprobs") - trajectory.gather("behav_logprobs")
        squares_N = np.square(log_ratio_N)
        squares_N[~trajectory.trained_N] = -1.0
        end = ends[trajectory.index]
        batch_squares[end - len(squares_N) : end] = squares_N
        local_squares.append(squares_N)
    batch_squares = world.add(batch_squares)
    trained_squares = batch_squares[batch_squares >= 0.0]
    limit = algo.m2_threshold(trained_squares, threshold)
    for trajectory, squares_N in zip(batch.local, local_squares, strict=True):
        trajectory.scatter("keep", squares_N <= limit)


def with_gradient(
    batch: TrainBatch,
    config: PPOConfig,
    world: World,
    advantages: Seq[np.ndarray | float],
) -> set[int]:
    """Return the indices of scored trajectories with a gradient, from advantage or other terms."""
    has_kl_loss = config.kl.coef > 0 and config.kl.place == "loss"
    if has_kl_loss or config.loss.entropy_coef or config.advantage.has_critic:
        return {i for i, header in enumerate(batch.headers) if header.reward is not None}
    local_largest = [float(np.abs(advantage).max()) for advantage in advantages]
    largest = _from_all_ranks(batch, world, local_largest)
    return {i for i, largest_advantage in enumerate(largest) if largest_advantage != 0.0}


def _from_all_ranks(
    batch: TrainBatch,
    world: World,
    values: Seq[float],
) -> list[float]:
    """Return one number for every trajectory of the batch, from `values` of the local ones."""
    numbers = np.zeros(len(batch.headers))
    local_indices = [trajectory.index for trajectory in batch.local]
    numbers[local_indices] = values
    return world.add(numbers).tolist()
