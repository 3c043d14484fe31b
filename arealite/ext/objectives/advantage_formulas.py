"""Advantages besides GRPO's: leave-one-out, discounted returns, and GAE (see api/algorithm.py).

NumPy is fast enough for a few numbers per token. Shapes: N = sampled tokens of one trajectory in
their order, without the tokens of observations.
"""

from collections.abc import Sequence

import numpy as np

from arealite.algo.advantages import deviations
from arealite.api.algorithm import AdvantageConfig, TokenAdvantage


def rloo(_config: AdvantageConfig, scores: Sequence[float]) -> list[float]:
    """Return R − mean of the *other* members (arXiv 2402.14740)."""
    # R − (n·mean − R) / (n − 1) = (R − mean) · n / (n − 1)
    scale = (len(scores) - 1) / len(scores)
    return [deviation / scale for deviation in deviations(scores)]


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
    config: AdvantageConfig,
    rewards_N: np.ndarray,
    _values_N: np.ndarray,
    _bootstrap: float,
) -> np.ndarray:
    """Return the discounted return of each token, float64 [N]."""
    return discounted_returns(rewards_N, gamma=config.gamma)


def _gae(
    config: AdvantageConfig,
    rewards_N: np.ndarray,
    values_N: np.ndarray,
    bootstrap: float,
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
