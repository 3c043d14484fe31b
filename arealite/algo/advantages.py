"""From rewards to advantages: reward shaping, group statistics, discounted returns, GAE.

NumPy is fast enough for a few numbers per token. Groups are identified by key, so a missing or
reordered sample never mixes two prompts. Shapes: N = sampled tokens of one trajectory in their
order, without the tokens of observations.
"""

import math
from collections.abc import Hashable, Sequence

import numpy as np

from arealite.api.algorithm import AdvantageConfig, ShapingConfig
from arealite.api.formulas import GroupAdvantage, TokenAdvantage


def group_advantages(
    rewards: Sequence[float | None],
    groups: Sequence[Hashable],
    compare: GroupAdvantage,
    config: AdvantageConfig,
) -> list[float]:
    """Return the advantage of each episode relative to its group.

    Args:
        rewards: The reward of each episode. None: it has no score and takes no part in its group.
        groups: The key of each episode's group. Groups may have different sizes.
        compare: The advantages of one group.
        config: The options of `compare`.

    Returns:
        One advantage per episode; 0 without a score, in groups of one score and in groups of equal
        rewards.
    """
    advantages = [0.0] * len(rewards)
    for members in members_of_groups(groups):
        scores = dict[int, float]()
        for index in members:
            score = rewards[index]
            if score is not None:
                scores[index] = score
        if len({*scores.values()}) < 2:
            continue
        group = compare(config, [*scores.values()])
        for index, advantage in zip(scores, group, strict=True):
            advantages[index] = advantage
    return advantages


def grpo(config: AdvantageConfig, scores: Sequence[float]) -> list[float]:
    """Return (R − mean) / (std + eps), with the sample standard deviation (arXiv 2402.03300)."""
    deviations = _deviations(scores)
    squares = math.fsum(deviation**2 for deviation in deviations)
    scale = math.sqrt(squares / (len(scores) - 1)) + config.eps
    return [deviation / scale for deviation in deviations]


def dr_grpo(_config: AdvantageConfig, scores: Sequence[float]) -> list[float]:
    """Return R − mean (arXiv 2503.20783)."""
    return _deviations(scores)


def rloo(_config: AdvantageConfig, scores: Sequence[float]) -> list[float]:
    """Return R − mean of the *other* members (arXiv 2402.14740)."""
    # R − (n·mean − R) / (n − 1) = (R − mean) · n / (n − 1)
    scale = (len(scores) - 1) / len(scores)
    return [deviation / scale for deviation in _deviations(scores)]


def _deviations(scores: Sequence[float]) -> list[float]:
    """Return R − mean."""
    mean = math.fsum(scores) / len(scores)
    return [score - mean for score in scores]


def members_of_groups(groups: Sequence[Hashable]) -> list[list[int]]:
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


def _returns(
    config: AdvantageConfig, rewards_N: np.ndarray, _values_N: np.ndarray, _bootstrap: float
) -> np.ndarray:
    """Return the discounted return of each token, float64 [N]."""
    return discounted_returns(rewards_N, gamma=config.gamma)


def _gae(
    config: AdvantageConfig, rewards_N: np.ndarray, values_N: np.ndarray, bootstrap: float
) -> np.ndarray:
    """Return generalized advantage estimates, float64 [N].

    A_t = δ_t + gamma · lam · A_{t+1}, δ_t = r_t + gamma · V_{t+1} − V_t (arXiv 1506.02438 eq. 16).

    Args:
        config: The options.
        rewards_N: Reward of each token.
        values_N: Value of the state in which each token was sampled.
        bootstrap: Value of the state after the last token; 0 if the episode has finished.
    """
    gamma = config.gamma
    values_N = values_N.astype(np.float64)
    next_values_N = np.append(values_N[1:], bootstrap)
    deltas_N = rewards_N + gamma * next_values_N - values_N
    return discounted_returns(deltas_N, gamma=gamma * config.gae_lambda)


reinforce = TokenAdvantage(formula=_returns)
gae = TokenAdvantage(formula=_gae, has_critic=True)


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
