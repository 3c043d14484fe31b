"""From rewards and what the models said of a batch to its advantages, and so to its minibatches.

Apart from the rows, because here ranks must agree: one number a trajectory is shared, exactly, and
everything over the batch is computed from those numbers in the headers' order. So no result depends
on how many ranks there are. Shape letters: T = tokens of one row, N = tokens that the policy
sampled in one trajectory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import numpy as np
import torch

from arealite.algo.advantages import (
    discounted_returns,
    gae,
    group_advantages,
    m2_threshold,
    overlong_penalty,
    shape_rewards,
)
from arealite.algo.losses import kl_estimate
from arealite.api.algorithm import ShapingConfig
from arealite.api.engine import Sequence
from arealite.api.trainer import PPOConfig
from arealite.impl.trainer.batch import Minibatch, Owned, TrainBatch
from arealite.impl.trainer.world import World


def estimate(batch: TrainBatch, config: PPOConfig, world: World) -> list[Minibatch]:
    """Give rows `advantages` (with a critic `returns`, for M2PO `keep`); return the minibatches.

    Rows have prox_logprobs, and where the config asks for them ref_logprobs and values. A
    trajectory whose gradient is 0 on every token is left out of the minibatches on every rank.
    """
    found: Seq[np.ndarray | float]
    if config.advantage.is_relative:
        found = _relative(batch, config, world)
    else:
        found = [_by_token(batch, own, config) for own in batch.owned]
    if config.advantage.normalize:
        found = _normalized(batch, world, found, eps=config.advantage.eps)
    for own, advantages_N in zip(batch.owned, found, strict=True):
        own.lay("advantages", advantages_N)
    if config.loss.m2_threshold is not None:
        _mask_outliers(batch, world, config.loss.m2_threshold)
    return batch.minibatches(_moving(batch, config, world, found))


def critic_rows(batch: TrainBatch) -> tuple[list[Sequence], list[list[int]]]:
    """Return rows over all sampled tokens, and the row lengths of every rank, for a critic.

    The last row of a truncated episode has one token more: its value is that of the state which
    the episode was left in.
    """
    cut = {i for i, header in enumerate(batch.headers) if header.truncated}
    rows: list[Sequence] = []
    for own in batch.owned:
        made = [
            Sequence(row.tokens, mask_T, row.temperature)
            for row, mask_T in zip(own.rows, own.sampled, strict=True)
        ]
        if own.index in cut:
            last = made[-1]
            last.tokens = np.append(last.tokens, last.tokens[-1:])
            last.loss_mask = np.append(last.loss_mask, True)
        rows += made
    return rows, batch.lengths(range(len(batch.headers)), longer=cut)


def take_values(batch: TrainBatch, values: Seq[np.ndarray]) -> None:
    """Make what the critic said of critic_rows the field `values` of the batch's own rows."""
    begin = 0
    for own in batch.owned:
        given = values[begin : begin + len(own.rows)]
        for row, values_T in zip(own.rows, given, strict=True):
            row.fields["values"] = values_T[: len(row.tokens)]
        if batch.headers[own.index].truncated:
            own.bootstrap = float(given[-1][-1])
        begin += len(own.rows)


def _relative(batch: TrainBatch, config: PPOConfig, world: World) -> list[float]:
    """Return each owned trajectory's advantage over its group, that of all its tokens."""
    rewards = [header.reward for header in batch.headers]
    if config.reward != ShapingConfig() or _has_kl_reward(config):
        batch.scores = [float(_rewards(batch, own, config).sum()) for own in batch.owned]
        rewards = _share(batch, world, batch.scores)
    groups = [(header.group_id, header.seat) for header in batch.headers]
    kind, eps = config.advantage.type, config.advantage.eps
    advantages = group_advantages(rewards, groups, kind=kind, eps=eps)
    return [advantages[own.index] for own in batch.owned]


def _by_token(batch: TrainBatch, own: Owned, config: PPOConfig) -> np.ndarray:
    """Return advantages [N] of returns over the trajectory's sampled tokens in their order."""
    rewards_N, options = _rewards(batch, own, config), config.advantage
    batch.scores.append(float(rewards_N.sum()))
    if options.type == "reinforce":
        return discounted_returns(rewards_N, gamma=options.gamma)
    advantages_N, returns_N = gae(
        rewards_N,
        own.pick("values"),
        bootstrap=own.bootstrap,
        gamma=options.gamma,
        lam=options.gae_lambda,
    )
    own.lay("returns", returns_N)
    return advantages_N


def _rewards(batch: TrainBatch, own: Owned, config: PPOConfig) -> np.ndarray:
    """Return what the algorithm takes each sampled token's reward to be, float64 [N]."""
    shaping = config.reward
    rewards_N = shape_rewards(own.rewards_N, shaping)
    if shaping.overlong_buffer > 0:
        limit = config.collector.sampling.max_new_tokens
        for last, length in own.turns():
            rewards_N[last] -= overlong_penalty(
                length,
                limit=limit,
                buffer=shaping.overlong_buffer,
                penalty=shaping.overlong_penalty,
            )
    if _has_kl_reward(config):
        log_ratio_N = torch.from_numpy(own.pick("prox_logprobs") - own.pick("ref_logprobs"))
        rewards_N -= config.kl.coef * kl_estimate(log_ratio_N, config.kl.estimator).numpy()
    return rewards_N


def _has_kl_reward(config: PPOConfig) -> bool:
    return config.kl.coef > 0 and config.kl.place == "reward"


def _normalized(
    batch: TrainBatch, world: World, found: Seq[np.ndarray | float], *, eps: float
) -> list[np.ndarray]:
    """Return advantages of mean 0 and standard deviation 1 over the batch's sampled tokens."""
    counts = [header.trained_tokens for header in batch.headers]
    pairs = zip(batch.owned, found, strict=True)
    found = [np.broadcast_to(advantage, counts[own.index]) for own, advantage in pairs]
    count = sum(counts)
    mean = math.fsum(_share(batch, world, [float(a_N.sum()) for a_N in found])) / count
    moved = [a_N - mean for a_N in found]
    square = math.fsum(_share(batch, world, [float(np.square(a_N).sum()) for a_N in moved]))
    scale = math.sqrt(square / count) + eps or 1.0
    return [a_N / scale for a_N in moved]


def _mask_outliers(batch: TrainBatch, world: World, threshold: float) -> None:
    """Give rows the field `keep`: 0 for tokens farthest off policy, over the global batch."""
    ends = np.cumsum([header.trained_tokens for header in batch.headers])
    squares, mine = np.zeros(int(ends[-1])), list[np.ndarray]()
    for own in batch.owned:
        own_N = np.square(own.pick("prox_logprobs") - own.pick("behav_logprobs"))
        own_N[~own.trained_N] = -1.0
        squares[ends[own.index] - len(own_N) : ends[own.index]] = own_N
        mine.append(own_N)
    squares = world.add(squares)
    cut = m2_threshold(squares[squares >= 0.0], threshold)
    for own, own_N in zip(batch.owned, mine, strict=True):
        own.lay("keep", own_N <= cut)


def _moving(
    batch: TrainBatch, config: PPOConfig, world: World, found: Seq[np.ndarray | float]
) -> set[int]:
    """Return the trajectories with a gradient: without an advantage, others may give one."""
    in_loss = config.kl.coef > 0 and config.kl.place == "loss"
    if in_loss or config.loss.entropy_coef or config.advantage.type == "gae":
        return set(range(len(batch.headers)))
    own = [abs(a) if isinstance(a, float) else float(np.abs(a).max()) for a in found]
    peaks = _share(batch, world, own)
    return {i for i, peak in enumerate(peaks) if peak != 0.0}


def _share(batch: TrainBatch, world: World, values: Seq[float]) -> list[float]:
    """Return one number of every trajectory of the batch, from those of the owned ones."""
    numbers = np.zeros(len(batch.headers))
    numbers[[own.index for own in batch.owned]] = values
    return world.add(numbers).tolist()
