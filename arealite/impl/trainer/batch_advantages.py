"""Computes the advantages of a batch from rewards and model outputs, and then its minibatches.

Each rank computes one number for each of its trajectories. All ranks exchange these numbers and sum
them in the order of the headers, so that no result depends on the number of ranks. Shape letters:
T = tokens of one row, N = tokens that the policy sampled in one trajectory.
"""

import math
from collections.abc import Sequence as Seq

import numpy as np

from arealite.algo.advantages import group_advantages
from arealite.api.algorithm import GroupAdvantage, TokenAdvantage
from arealite.api.hooks import (
    AdvantageChangeMaker,
    RewardChange,
    RewardChangeMaker,
    TokenMaskMaker,
)
from arealite.api.trainer import PPOConfig
from arealite.base import entries
from arealite.impl.trainer.batch import Minibatch, TrainBatch, Trajectory
from arealite.impl.trainer.rank_group import World


def compute_advantages(
    batch: TrainBatch,
    config: PPOConfig,
    world: World,
) -> list[Minibatch]:
    """Set the field `advantages` of the rows; return the minibatches.

    The rows must have prox_logprobs, and ref_logprobs and values if the config needs them. With a
    critic the rows also get `returns`, and with a mask of tokens `keep`. The minibatches exclude
    trajectories whose gradient is 0 on every token.
    """
    advantages: Seq[np.ndarray | float]
    change_makers: list[RewardChangeMaker] = entries.hooks("reward_change")
    changes = entries.results(change_makers, config)
    function = config.advantage.function
    if isinstance(function, TokenAdvantage):
        advantages = list[np.ndarray]()
        for trajectory in batch.local:
            advantages_N = _token_advantages(batch, trajectory, config, function, changes)
            advantages.append(advantages_N)
    else:
        advantages = _group_advantages(batch, config, world, function, changes)
    if config.advantage.normalize:
        advantages = _normalized(batch, world, advantages, eps=config.advantage.eps)
    advantage_makers: list[AdvantageChangeMaker] = entries.hooks("advantage_change")
    for advantage_change in entries.results(advantage_makers, config):
        pairs = zip(batch.local, advantages, strict=True)
        advantages = [advantage_change(trajectory, advantage) for trajectory, advantage in pairs]
    for trajectory, advantages_N in zip(batch.local, advantages, strict=True):
        trajectory.scatter("advantages", advantages_N)
    mask_makers: list[TokenMaskMaker] = entries.hooks("token_mask")
    for mask in entries.results(mask_makers, config):
        mask(batch, world)
    return batch.minibatches(with_gradient(batch, config, world, advantages))


def _group_advantages(
    batch: TrainBatch,
    config: PPOConfig,
    world: World,
    compare: GroupAdvantage,
    changes: Seq[RewardChange],
) -> list[float]:
    """Return one advantage for each local trajectory: its reward compared with its group."""
    if changes:
        rewards = _shaped_rewards(batch, world, changes)
    else:
        rewards = [header.reward for header in batch.headers]
    groups = [(header.group_id, header.seat) for header in batch.headers]
    advantages = group_advantages(rewards, groups, compare, config.advantage)
    return [advantages[trajectory.index] for trajectory in batch.local]


def _shaped_rewards(
    batch: TrainBatch,
    world: World,
    changes: Seq[RewardChange],
) -> list[float | None]:
    """Return the shaped reward of every trajectory of the batch; None if unscored.

    The rewards of scored local trajectories become the batch's `scores`.
    """
    local_rewards = list[float]()
    scores = list[float]()
    for trajectory in batch.local:
        reward = float(_rewards(trajectory, changes).sum())
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
    changes: Seq[RewardChange],
) -> np.ndarray:
    """Return advantages [N] of the sampled tokens; 0 if unscored."""
    if not trajectory.is_scored:
        trajectory.scatter("returns", 0.0)
        num_sampled = np.count_nonzero(np.concatenate(trajectory.sampled))
        return np.zeros(num_sampled)
    rewards_N = _rewards(trajectory, changes)
    batch.scores.append(float(rewards_N.sum()))
    values_N = np.zeros(len(rewards_N))
    if function.has_critic:
        values_N = trajectory.gather("values")
    advantages_N = function.formula(config.advantage, rewards_N, values_N, trajectory.bootstrap)
    if function.has_critic:
        trajectory.scatter("returns", advantages_N + values_N)
    return advantages_N


def _rewards(trajectory: Trajectory, changes: Seq[RewardChange]) -> np.ndarray:
    """Return the changed reward of each sampled token, float64 [N]."""
    rewards_N = trajectory.rewards_N
    for change in changes:
        rewards_N = change(trajectory, rewards_N)
    return rewards_N


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


def with_gradient(
    batch: TrainBatch,
    config: PPOConfig,
    world: World,
    advantages: Seq[np.ndarray | float],
) -> set[int]:
    """Return the indices of scored trajectories with a gradient, from advantage or other terms."""
    has_kl_loss = config.kl.coef > 0 and config.kl.place == "loss"
    changes_loss = entries.results(entries.hooks("loss_change"), config)
    if has_kl_loss or changes_loss or config.loss.entropy_coef or config.advantage.has_critic:
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
