"""Shaping, returns, GAE and M2PO: values by hand, naive implementations, and a known critic."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arealite.algo.losses import make_value_loss
from arealite.api.algorithm import AdvantageConfig, CriticConfig, ShapingConfig
from arealite.api.engine import LossInput
from arealite.ext.objectives.advantage_formulas import discounted_returns
from arealite.ext.objectives.m2po import m2_threshold
from arealite.ext.objectives.reward_changes import overlong_penalty, shape_rewards


def gae(
    rewards_N: np.ndarray, values_N: np.ndarray, *, bootstrap: float, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    config = AdvantageConfig(type="gae", gamma=gamma, gae_lambda=lam)
    advantages_N = config.function.formula(config, rewards_N, values_N, bootstrap)
    return advantages_N, advantages_N + values_N


# ---------------------------------------------------------------- rewards


def test_shaping_scales_then_clips_then_adds_the_bias_to_the_last_reward() -> None:
    rewards_N = np.array([0.0, 3.0, -1.0, 0.5])
    assert shape_rewards(rewards_N, ShapingConfig()).tolist() == [0.0, 3.0, -1.0, 0.5]
    shaping = ShapingConfig(scale=2.0, clip=1.5, bias=-0.25)
    assert shape_rewards(rewards_N, shaping).tolist() == [0.0, 1.5, -1.5, 0.75]
    assert rewards_N.tolist() == [0.0, 3.0, -1.0, 0.5]
    assert shape_rewards(np.zeros(0), shaping).tolist() == []


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (80, 0.0), (85, 0.5), (90, 1.0), (100, 2.0), (120, 2.0)]
)
def test_overlong_penalty_grows_over_the_buffer(length: int, penalty: float) -> None:
    assert overlong_penalty(length, limit=100, buffer=20, penalty=2.0) == penalty


def test_overlong_penalty_is_zero_without_a_buffer() -> None:
    assert overlong_penalty(500, limit=100, buffer=0, penalty=2.0) == 0.0


# ---------------------------------------------------------------- discounted, and with a critic


def test_discounted_returns_match_values_by_hand() -> None:
    got = discounted_returns(np.array([1.0, 0.0, 4.0]), gamma=0.5)
    assert got.tolist() == [2.0, 2.0, 4.0]
    assert discounted_returns(np.zeros(0), gamma=0.5).tolist() == []


def test_gae_matches_values_by_hand() -> None:
    # δ = [0 + 0.5·2 − 1, 1 + 0.5·4 − 2, 2 + 0.5·8 − 4] = [0, 1, 2], and γλ = 0.25.
    advantages_N, returns_N = gae(
        np.array([0.0, 1.0, 2.0]), np.array([1.0, 2.0, 4.0]), bootstrap=8.0, gamma=0.5, lam=0.5
    )
    assert advantages_N.tolist() == [0.375, 1.5, 2.0]
    assert returns_N.tolist() == [1.375, 3.5, 6.0]


values = st.floats(-5, 5, allow_nan=False, width=32)
trajectories = st.lists(st.tuples(values, values), min_size=1, max_size=12)
factors = st.floats(0, 1)


@given(trajectories, values, factors, factors)
def test_gae_is_the_weighted_mean_of_n_step_advantages(
    steps: list[tuple[float, float]], bootstrap: float, gamma: float, lam: float
) -> None:
    rewards, states = [s[0] for s in steps], [*(s[1] for s in steps), bootstrap]
    got, returns = gae(
        np.array(rewards), np.array(states[:-1]), bootstrap=bootstrap, gamma=gamma, lam=lam
    )
    count = len(rewards)
    for t in range(count):
        # The n-step estimator has weight (1 − λ)·λ^(n−1); the longest has the remaining weight.
        expected, horizon = 0.0, count - t
        for n in range(1, horizon + 1):
            gain = sum(gamma**k * rewards[t + k] for k in range(n)) + gamma**n * states[t + n]
            share = lam ** (n - 1) * (1.0 if n == horizon else 1.0 - lam)
            expected += share * (gain - states[t])
        assert got[t] == pytest.approx(expected, abs=1e-6)
        assert returns[t] == pytest.approx(expected + states[t], abs=1e-6)


@given(trajectories, factors)
def test_gae_with_lambda_1_is_the_return_minus_the_value(
    steps: list[tuple[float, float]], gamma: float
) -> None:
    rewards_N, values_N = np.array(steps).T
    advantages_N, returns_N = gae(rewards_N, values_N, bootstrap=0.0, gamma=gamma, lam=1.0)
    assert returns_N == pytest.approx(discounted_returns(rewards_N, gamma=gamma), abs=1e-6)
    assert advantages_N == pytest.approx(returns_N - values_N, abs=1e-6)


def walk(rng: random.Random) -> tuple[list[int], bool]:
    """Walk from the middle of five states to an end; return the path and if it ended right."""
    at, path = 2, list[int]()
    while 0 <= at <= 4:
        path.append(at)
        at += rng.choice((-1, 1))
    return path, at > 4


def test_critic_learns_the_known_values_of_a_random_walk() -> None:
    """State i of five ends on the right with a chance of (i + 1) / 6."""
    rng, table = random.Random(0), torch.zeros(5, requires_grad=True)
    loss_fn = make_value_loss(CriticConfig(value_clip=0.2))
    for step in range(150):
        paths, returns = list[int](), list[np.ndarray]()
        old = table.detach().clone()
        for path, won in (walk(rng) for _ in range(32)):
            rewards_N = np.zeros(len(path))
            rewards_N[-1] = float(won)
            values_N = old[path].numpy()
            returns.append(gae(rewards_N, values_N, bootstrap=0.0, gamma=1.0, lam=0.8)[1])
            paths.extend(path)
        fields = {
            "values": old[paths],
            "returns": torch.from_numpy(np.concatenate(returns)).float(),
            "loss_weight": torch.full((len(paths),), 1.0 / len(paths)),
        }
        rows_N = torch.zeros(len(paths), dtype=torch.int64)
        loss, _ = loss_fn(LossInput(outputs={"values": table[paths]}, rows_N=rows_N, fields=fields))
        (gradient,) = torch.autograd.grad(loss, table)
        with torch.no_grad():
            table -= 3.0 / (1 + step / 15) * gradient
    assert table.tolist() == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6], abs=0.04)


# ---------------------------------------------------------------- M2PO


@pytest.mark.parametrize(
    ("squares", "threshold", "bound"),
    [
        ([], 0.1, math.inf),
        ([0.0, 0.0], 0.1, math.inf),
        ([0.3, 0.1, 0.2], 0.2, math.inf),  # the mean is the threshold
        ([9.0, 0.1, 0.2], 0.2, 0.2),
        ([9.0, 0.1, 8.0, 0.2], 0.2, 0.2),
        ([1.0, 2.0], 0.5, -math.inf),
        ([0.0, 1.0, 1.0], 0.5, 0.0),  # equal values are dropped together
    ],
)
def test_m2_threshold_matches_values_by_hand(
    squares: list[float], threshold: float, bound: float
) -> None:
    assert m2_threshold(np.array(squares), threshold) == bound


@given(st.lists(st.sampled_from([0.0, 0.01, 0.03, 0.2, 1.0, 5.0]), max_size=12), factors)
def test_m2_threshold_keeps_as_many_tokens_as_possible(
    squares: list[float], threshold: float
) -> None:
    kept = [s for s in squares if s <= m2_threshold(np.array(squares), threshold)]
    assert sum(kept) <= threshold * len(kept) + 1e-9
    # Keeping the smallest dropped value, with all its duplicates, would exceed the threshold.
    left = [s for s in squares if s not in kept]
    if left:
        more = [*kept, *[s for s in left if s == min(left)]]
        assert sum(more) > threshold * len(more) - 1e-9
