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
    rewards: Sequence[float | None], groups: Sequence[Hashable], *, kind: str, eps: float
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
    for group in _members(groups):
        scored = {i: reward for i in group if (reward := rewards[i]) is not None}
        scores = [*scored.values()]
        if len({*scores}) < 2:
            continue
        mean = math.fsum(scores) / len(scores)
        others = len(scores) - 1
        scale = 1.0
        if kind == "grpo":
            scale = math.sqrt(math.fsum((r - mean) ** 2 for r in scores) / others) + eps
        elif kind == "rloo":  # R − (n·mean − R) / (n − 1) = (R − mean) · n / (n − 1)
            scale = others / len(scores)
        for i, reward in scored.items():
            advantages[i] = (reward - mean) / scale
    return advantages


def group_counts(rewards: Sequence[float | None], groups: Sequence[Hashable]) -> dict[str, float]:
    """Count groups, groups of one episode, and larger groups whose rewards are all equal.

    The latter include groups in which fewer than two episodes have a score.
    """
    found = [[rewards[i] for i in members] for members in _members(groups)]
    return {
        "groups": float(len(found)),
        "groups_of_one": float(sum(len(g) == 1 for g in found)),
        "groups_zero_variance": float(sum(len(g) > 1 and len({*g} - {None}) < 2 for g in found)),
    }


def _members(groups: Sequence[Hashable]) -> list[list[int]]:
    members: dict[Hashable, list[int]] = {}
    for i, key in enumerate(groups):
        members.setdefault(key, []).append(i)
    return list(members.values())


def shape_rewards(rewards_N: np.ndarray, config: ShapingConfig) -> np.ndarray:
    """Scale and clip each reward of an episode, then add the bias to the last; float64 [N]."""
    shaped_N = rewards_N.astype(np.float64) * config.scale
    if config.clip is not None:
        shaped_N = shaped_N.clip(-config.clip, config.clip)
    shaped_N[-1:] += config.bias
    return shaped_N


def overlong_penalty(length: int, *, limit: int, buffer: int, penalty: float) -> float:
    """Return the penalty for a long answer, in [0, penalty] (DAPO, arXiv 2503.14476 eq. 13).

    It is 0 up to limit − buffer tokens and grows linearly to `penalty` at the limit.

    Args:
        length: Tokens of the answer.
        limit: Largest number of tokens of an answer.
        buffer: Number of tokens before the limit over which the penalty grows; 0: no penalty.
        penalty: The largest penalty.
    """
    excess = length - (limit - buffer)
    return penalty * min(max(excess / buffer, 0.0), 1.0) if buffer > 0 else 0.0


def discounted_returns(rewards_N: np.ndarray, *, gamma: float) -> np.ndarray:
    """Return G_t = r_t + gamma · G_{t+1} of each token, float64 [N]."""
    later = 0.0
    returns = list[float]()
    for reward in rewards_N[::-1].tolist():
        later = reward + gamma * later
        returns.append(later)
    return np.array(returns[::-1], np.float64)


def gae(
    rewards_N: np.ndarray, values_N: np.ndarray, *, bootstrap: float, gamma: float, lam: float
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
    deltas_N = rewards_N + gamma * np.append(values_N[1:], bootstrap) - values_N
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
    is_below = np.cumsum(ordered) <= threshold * np.arange(1, len(ordered) + 1)
    if is_below.all():
        return math.inf
    below = ordered[ordered < ordered[int(is_below.sum())]]
    return float(below[-1]) if len(below) else -math.inf
