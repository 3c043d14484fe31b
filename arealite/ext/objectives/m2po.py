"""M2PO's mask of off-policy tokens (arXiv 2510.01161; hook `token_mask`)."""

import math
from functools import partial

import numpy as np

from arealite.api.hooks import TokenMask
from arealite.api.trainer import PPOConfig
from arealite.impl.trainer.batch import TrainBatch
from arealite.impl.trainer.rank_group import World


def outliers(config: PPOConfig) -> TokenMask | None:
    """Return what masks the most off-policy tokens; None without `loss.m2_threshold`."""
    threshold = config.loss.m2_threshold
    if threshold is None:
        return None
    return partial(mask_outliers, threshold)


def mask_outliers(threshold: float, batch: TrainBatch, world: World) -> None:
    """Set the field `keep` of the rows: 0 for the most off-policy tokens of the whole batch."""
    ends = np.cumsum([header.trained_tokens for header in batch.headers])
    batch_squares = np.zeros(int(ends[-1]))  # of all sampled tokens, in the headers' order
    local_squares = list[np.ndarray]()
    for trajectory in batch.local:
        prox_logprobs_N = trajectory.gather("prox_logprobs")
        behav_logprobs_N = trajectory.gather("behav_logprobs")
        squares_N = np.square(prox_logprobs_N - behav_logprobs_N)
        squares_N[~trajectory.trained_N] = -1.0
        end = ends[trajectory.index]
        batch_squares[end - len(squares_N) : end] = squares_N
        local_squares.append(squares_N)
    batch_squares = world.add(batch_squares)
    trained_squares = batch_squares[batch_squares >= 0.0]
    limit = m2_threshold(trained_squares, threshold)
    for trajectory, squares_N in zip(batch.local, local_squares, strict=True):
        trajectory.scatter("keep", squares_N <= limit)


def m2_threshold(squares: np.ndarray, threshold: float) -> float:
    """Return the largest square that M2PO keeps; the caller masks tokens above it.

    M2PO removes the largest squares, equal ones together, until the mean of the rest is at most
    `threshold` (arXiv 2510.01161).

    Args:
        squares: (log π_prox − log π_behav)² of all tokens of all ranks.
        threshold: Largest mean of the kept squares.

    Returns:
        The largest kept square; inf if all tokens are kept, −inf if none is.
    """
    ordered = np.sort(squares.astype(np.float64))
    # The mean of the n smallest squares grows with n.
    counts = np.arange(1, len(ordered) + 1)
    is_below = np.cumsum(ordered) <= threshold * counts
    if is_below.all():
        return math.inf
    num_below = int(is_below.sum())
    smallest_removed = ordered[num_below]
    kept = ordered[ordered < smallest_removed]
    if len(kept) == 0:
        return -math.inf
    return float(kept[-1])
