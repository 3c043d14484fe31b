"""The policy loss: a table worked out by hand, a naive second implementation, and its gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arealite.algo.losses import effective_sample_share, make_policy_loss
from arealite.api.algorithm import LossConfig
from arealite.api.engine import LossInput


def run(
    config: LossConfig, tokens: list[tuple[float, float, float, float]], weight: float = 1.0
) -> tuple[torch.Tensor, dict[str, float], torch.Tensor]:
    """Tokens are (logprob, prox, behav, advantage); returns loss, stats and ∂loss/∂logprobs."""
    columns = torch.tensor(tokens, dtype=torch.float32).reshape(-1, 4).T
    logprobs = columns[0].clone().requires_grad_()
    fields = {
        "prox_logprobs": columns[1],
        "behav_logprobs": columns[2],
        "advantages": columns[3],
        "loss_weight": torch.full((len(tokens),), weight),
    }
    entropy = torch.full((len(tokens),), 0.5)
    rows = torch.zeros(len(tokens), dtype=torch.int64)
    loss, stats = make_policy_loss(config)(
        LossInput({"logprobs": logprobs, "entropy": entropy}, rows, fields)
    )
    loss.backward()
    assert logprobs.grad is not None
    return loss.detach(), {k: float(v) for k, v in stats.items()}, logprobs.grad


LOG = math.log
# (u, w before the cap, A) → loss, ∂loss/∂logprob, at eps 0.2/0.3, cap 2, dual clip 3
TABLE = [
    (1.0, 1.0, 2.0, -2.0, -2.0),
    (1.1, 1.0, 1.0, -1.1, -1.1),
    (1.5, 1.0, 1.0, -1.3, 0.0),  # clipped high
    (0.5, 1.0, 1.0, -0.5, -0.5),  # below, but A > 0: not clipped
    (0.5, 1.0, -1.0, 0.8, 0.0),  # clipped low
    (1.5, 1.0, -1.0, 1.5, 1.5),  # above, but A < 0: not clipped
    (4.0, 1.0, -1.0, 3.0, 0.0),  # dual clip at 3·|A|
    (1.1, 0.5, 1.0, -0.55, -0.55),  # behaviour weight scales both
    (1.1, 8.0, 1.0, -2.2, -2.2),  # capped at 2
    (1.0, 1.0, 0.0, 0.0, 0.0),
]


@pytest.mark.parametrize(("u", "w", "advantage", "loss", "grad"), TABLE)
def test_table(u: float, w: float, advantage: float, loss: float, grad: float) -> None:
    config = LossConfig(eps_low=0.2, eps_high=0.3, behav_weight_cap=2.0, dual_clip=3.0)
    prox = -1.0
    got, stats, gradient = run(config, [(prox + LOG(u), prox, prox - LOG(w), advantage)])
    assert float(got) == pytest.approx(loss, abs=1e-6)
    assert float(gradient[0]) == pytest.approx(grad, abs=1e-6)
    assert stats["ratio"] == pytest.approx(u, rel=1e-5)
    assert stats["behav_weight"] == pytest.approx(min(w, 2.0), rel=1e-5)


def test_coupled_uses_the_behaviour_policy_and_no_weight() -> None:
    config = LossConfig(decoupled=False, eps_low=0.2, eps_high=0.2)
    loss, stats, _ = run(config, [(-1.0, -7.0, -1.0 - LOG(1.1), 1.0)])
    assert float(loss) == pytest.approx(-1.1, rel=1e-5)
    assert not {"behav_weight", "prox_behav_abs_diff"} & set(stats)


def test_stats_are_weighted_sums() -> None:
    config = LossConfig(eps_low=0.2, eps_high=0.2, behav_weight_cap=2.0)
    tokens = [
        (LOG(0.5), 0.0, 0.0, -1.0),
        (LOG(2.0), 0.0, -LOG(4.0), 1.0),
        (0.0, 0.0, 0.0, 1.0),
        (0.0, 0.0, LOG(2.0), 1.0),
    ]
    _, stats, _ = run(config, tokens, weight=0.25)
    expected = {
        "clip_frac_low": 0.25,
        "clip_frac_high": 0.25,
        "ratio": (0.5 + 2.0 + 1.0 + 1.0) / 4,
        "approx_kl": (0.5 - 1 - LOG(0.5) + 2.0 - 1 - LOG(2.0)) / 4,
        "behav_weight": (1 + 2 + 1 + 0.5) / 4,
        "behav_weight_sq": (1 + 4 + 1 + 0.25) / 4,
        "behav_capped_frac": 0.25,
        "prox_behav_abs_diff": (LOG(4.0) + LOG(2.0)) / 4,
        "entropy": 0.5,
        "weight": 1.0,
    }
    assert {k: stats[k] for k in expected} == pytest.approx(expected, abs=1e-6)
    assert effective_sample_share(stats) == pytest.approx(4.5**2 / (4 * 6.25), rel=1e-5)


def test_extreme_ratios_give_finite_gradients() -> None:
    tokens = [(0.0, -200.0, -400.0, 0.0), (0.0, -200.0, 0.0, 1.0), (-300.0, 0.0, 0.0, -1.0)]
    loss, _, grad = run(LossConfig(behav_weight_cap=None), tokens)
    assert torch.isfinite(loss)
    assert torch.isfinite(grad).all()


def test_no_tokens_is_a_zero_that_can_be_differentiated() -> None:
    loss, stats, grad = run(LossConfig(), [])
    assert float(loss) == 0.0
    assert grad.shape == (0,)
    assert set(stats.values()) == {0.0}


def naive(config: LossConfig, token: tuple[float, float, float, float]) -> float:
    logprob, prox, behav, advantage = token
    u = math.exp(logprob - (prox if config.decoupled else behav))
    w = 1.0
    if config.decoupled:
        w = math.exp(prox - behav)
        if config.behav_weight_cap is not None and w > config.behav_weight_cap:
            w = config.behav_weight_cap
    low, high = 1 - config.eps_low, 1 + config.eps_high
    objective = min(u * advantage, max(low, min(high, u)) * advantage)
    if config.dual_clip is not None and advantage < 0:
        objective = max(objective, config.dual_clip * advantage)
    return -w * objective


logprob_values = st.floats(-4, 0, allow_nan=False, width=32)
token_values = st.tuples(
    logprob_values, logprob_values, logprob_values, st.floats(-3, 3, allow_nan=False, width=32)
)
configs = st.builds(
    LossConfig,
    eps_low=st.floats(0.05, 0.5),
    eps_high=st.floats(0.05, 0.5),
    decoupled=st.booleans(),
    behav_weight_cap=st.sampled_from([None, 1.0, 5.0]),
    dual_clip=st.sampled_from([None, 1.5, 3.0]),
)


@given(configs, st.lists(token_values, max_size=8))
def test_agrees_with_the_naive_one(
    config: LossConfig, tokens: list[tuple[float, float, float, float]]
) -> None:
    loss, _, _ = run(config, tokens, weight=0.5)
    expected = 0.5 * sum(naive(config, token) for token in tokens)
    assert float(loss) == pytest.approx(expected, rel=1e-4, abs=1e-4)
