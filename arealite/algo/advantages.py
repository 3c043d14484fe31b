"""From rewards to advantages: reward shaping, group statistics, discounted returns, GAE.

NumPy is fast enough for a few numbers per token. Groups are identified by key, so a missing or
reordered sample never mixes two prompts. Shapes: N = sampled tokens of one trajectory in their
order, without the tokens of observations.
"""

import math
from collections.abc import Hashable, Sequence

import numpy as np

from arealite.api.algorithm import ShapingConfig


def group_advantages(
    rewards: Sequence[float | None],
    groups: Sequence[Hashable],
    *,
    kind: str,
    eps: float,
) -> list[float]:
    """Return the advantage of each episode relative to its group.

    grpo: (R_i − mean_g) / (std_g + eps), with the sample standard deviation (n − 1). dr_grpo:
    R_i − mean_g. rloo: R_i − mean of the *other* members. Sources: GRPO, arXiv 2402.03300; Dr.GRPO,
    arXiv 2503.20783; RLOO, arXiv 2402.14740.

    Args:
        rewards: The reward of each episode. None: it has no score and takes no part in its group.
        groups: The key of each episode's group. Groups may have different sizes.
        kind: grpo, dr_grpo or rloo.
        eps: Added to the standard deviation of grpo.

    Returns:
        One advantage per episode; 0 without a score, in groups of one score and in groups of equal
        rewards.
    """
    advantages = [0.0] * len(rewards)
    for members in _members(groups):
        scores = dict[int, float]()
        for index in members:
            score = rewards[index]
            if score is not None:
                scores[index] = score
        if len({*scores.values()}) < 2:
            continue
        mean = math.fsum(scores.values()) / len(scores)
        scale = _scale(
            [*scores.values()],
            mean,
            kind=kind,
            eps=eps,
        )
        for index, score in scores.items():
            advantages[index] = (score - mean) / scale
    return advantages


def _scale(
    scores: list[float],
    mean: float,
    *,
    kind: str,
    eps: float,
) -> float:
    """Return the number by which deviations from the mean of a group are divided."""
    num_others = len(scores) - 1
    if kind == "grpo":
        squares = math.fsum((score - mean) ** 2 for score in scores)
        return math.sqrt(squares / num_others) + eps
    if kind == "rloo":  # R − (n·mean − R) / (n − 1) = (R − mean) · n / (n − 1)
        return num_others / len(scores)
    return 1.0


def group_counts(rewards: Sequence[float | None], groups: Sequence[Hashable]) -> dict[str, float]:
    """Count groups, groups of one episode, and larger groups whose rewards are all equal.

    The latter include groups in which fewer than two episodes have a score.
    """
    num_groups = 0
    num_single = 0
    num_equal = 0
    for members in _members(groups):
        num_groups += 1
        scores = {rewards[index] for index in members} - {None}
        if len(members) == 1:
            num_single += 1
        elif len(scores) < 2:
            num_equal += 1
    return {
        "groups": float(num_groups),
        "groups_of_one": float(num_single),
        "groups_zero_variance": float(num_equal),
    }


def _members(groups: Sequence[Hashable]) -> list[list[int]]:
    """Return the indices of the episodes of each group."""
    members: dict[Hashable, list[int]] = {}
    for index, key in enumerate(groups):
        members.setdefault(key, []).append(index)
    return list(members.values())


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


def discounted_returns(rewards_N: np.ndarray, *, gamma: float) -> np.ndarray:
    """Return G_t = r_t + gamma · G_{t+1} of each token, float64 [N]."""
    next_return = 0.0
    reversed_returns = list[float]()
    for reward in rewards_N[::-1].tolist():
        next_return = reward + gamma * next_return
        reversed_returns.append(next_return)
    returns = reversed_returns[::-1]
    return np.array(returns, np.float64)


def gae(
    rewards_N: np.ndarray,
    values_N: np.ndarray,
    *,
    bootstrap: float,
    gamma: float,
    lam: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Return (advantages, returns) by generalized advantage estimation, float64 [N] each.

    A_t = δ_t + gamma · lam · A_{t+1}, δ_t = r_t + gamma · V_{t+1} − V_t (arXiv 1506.02438 eq. 16).
    The return is A_t + V_t.

    Args:
        rewards_N: Reward of each token.
        values_N: Value of the state in which each token was sampled.
        bootstrap: Value of the state after the last token; 0 if the episode has finished.
        gamma: Discount per token.
        lam: Lambda of GAE.
    """
    values_N = values_N.astype(np.float64)
    next_values_N = np.append(values_N[1:], bootstrap)
    deltas_N = rewards_N + gamma * next_values_N - values_N
    advantages_N = discounted_returns(deltas_N, gamma=gamma * lam)
    return advantages_N, advantages_N + values_N


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
