"""The losses: tables by hand, a naive implementation, and invariances."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from arealite.algo.losses import make_policy_loss, make_value_loss
from arealite.api.algorithm import CriticConfig, KLConfig, LossConfig, objectives
from arealite.api.engine import LossInput
from arealite.base.errors import UserError
from tests.algo import naive_losses as naive

LOG = math.log
PPO = LossConfig(eps_low=0.2, eps_high=0.3, behav_weight_cap=2.0, dual_clip=3.0)
NO_KL = KLConfig()
OBJECTIVES = ["ppo", "cispo", "sapo", "reinforce", "dppo_tv", "dppo_kl"]


def run(
    config: LossConfig,
    tokens: list[tuple[float, ...]],
    *,
    kl: KLConfig = NO_KL,
    rows: list[int] | None = None,
    weight: float = 1.0,
    keep: list[float] | None = None,
) -> tuple[float, dict[str, float], list[float]]:
    """Return loss, stats and ∂loss/∂logprobs of (logprob, prox, behav, advantage[, ref]) tokens."""
    columns = torch.tensor([(*t, 0.0)[:5] for t in tokens], dtype=torch.float32).reshape(-1, 5).T
    logprobs = columns[0].clone().requires_grad_()
    names = ("prox_logprobs", "behav_logprobs", "advantages", "ref_logprobs")
    fields = dict(zip(names, columns[1:], strict=True))
    fields["loss_weight"] = torch.full((len(tokens),), weight)
    if keep is not None:
        fields["keep"] = torch.tensor(keep)
    outputs = {"logprobs": logprobs, "entropy": torch.full((len(tokens),), 0.5)}
    rows_N = torch.tensor(rows or [0] * len(tokens), dtype=torch.int64)
    loss, stats = make_policy_loss(config, kl)(
        LossInput(outputs=outputs, rows_N=rows_N, fields=fields)
    )
    loss.backward()
    assert logprobs.grad is not None
    assert not any(value.requires_grad for value in stats.values())
    return float(loss.detach()), {k: float(v) for k, v in stats.items()}, logprobs.grad.tolist()


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
def test_ppo_loss_matches_the_table(
    u: float, w: float, advantage: float, loss: float, grad: float
) -> None:
    prox = -1.0
    got, stats, gradient = run(PPO, [(prox + LOG(u), prox, prox - LOG(w), advantage)])
    assert got == pytest.approx(loss, abs=1e-6)
    assert gradient[0] == pytest.approx(grad, abs=1e-6)
    assert stats["ratio"] == pytest.approx(u, rel=1e-5)
    assert stats["behav_weight"] == pytest.approx(min(w, 2.0), rel=1e-5)
    assert stats["clip_frac_low"] == float((u, advantage) == (0.5, -1.0))
    assert stats["clip_frac_high"] == float((u, advantage) == (1.5, 1.0))


# objective, (u, A) → loss, ∂loss/∂logprob at log π = −2, eps 0.2/0.3, taus 1 and 2
OTHERS = [
    ("cispo", 1.1, 1.0, 2.2, -1.1),  # −u·A·log π, and −u·A
    ("cispo", 9.0, 1.0, 2.6, -1.3),  # the weight is clipped, the gradient is kept
    ("cispo", 0.1, -1.0, -1.6, 0.8),
    ("reinforce", 9.0, 3.0, 6.0, -3.0),
    ("reinforce", 0.1, -1.0, -2.0, 1.0),
    ("sapo", 1.0, 1.0, -2.0, -1.0),  # 4/τ·σ(0) = 2, slope 4·σ'(0)·u = 1
    ("sapo", 2.0, 1.0, -4 * 0.7310585786, -8 * 0.1966119332),
    ("sapo", 2.0, -1.0, 2 * 0.8807970780, 8 * 0.1049935854),
    # DPPO at π = e⁻² = 0.135: |μ − π| is 0.068 for u = 2, and 0.135 for u = 0.5; eps is 0.2/0.3.
    ("dppo_tv", 2.0, 1.0, 4.0, -2.0),
    ("dppo_tv", 0.5, -1.0, -1.0, 0.5),
    ("dppo_tv", 0.25, -1.0, 0.0, 0.0),  # |μ − π| = 0.406, and A < 0 would increase it
    ("dppo_tv", 0.25, 1.0, 0.5, -0.25),  # A > 0 decreases it
    ("dppo_tv", 50.0, 1.0, 40.0, -20.0),  # bounded at 20
    ("dppo_kl", 0.25, -1.0, 0.0, 0.0),  # KL 0.394
    ("dppo_kl", 0.5, -1.0, -1.0, 0.5),  # KL 0.064
]


def test_dppo_masks_a_large_divergence_for_which_ppo_would_not_clip() -> None:
    """π = 0.9 and μ = 0.75: the ratio 1.2 is inside PPO's range, |μ − π| = 0.15 is above δ."""
    token = (LOG(0.9), LOG(0.75), LOG(0.75), 1.0)
    config = LossConfig(eps_low=0.1, eps_high=0.21, decoupled=False)
    assert run(config, [token])[2][0] == pytest.approx(-1.2, rel=1e-5)
    for objective in ("dppo_tv", "dppo_kl"):
        bounded = replace(config, objective=objective, eps_high=0.05)
        assert run(bounded, [token])[2] == [0.0]


@pytest.mark.parametrize(("objective", "u", "advantage", "loss", "grad"), OTHERS)
def test_other_objectives_match_the_table(
    objective: str, u: float, advantage: float, loss: float, grad: float
) -> None:
    config = replace(PPO, objective=objective, dual_clip=None, sapo_tau=1.0, sapo_tau_neg=2.0)
    got, stats, gradient = run(config, [(-2.0, -2.0 - LOG(u), -2.0 - LOG(u), advantage)])
    assert got == pytest.approx(loss, rel=1e-5)
    assert gradient[0] == pytest.approx(grad, rel=1e-5)
    assert ("clip_frac_high" in stats) == (objective == "cispo")
    assert stats.get("clip_frac_high", 0.0) == float(objective == "cispo" and u == 9.0)


def test_sequence_ratio_is_the_rows_geometric_mean_and_shares_its_gradient() -> None:
    # Row 0: ratios 2 and 0.5 make 1; row 1: 4 and 1 make 2, clipped for A > 0; row 2: one token.
    tokens = [(LOG(r), 0.0, 0.0, a) for r, a in [(2, 1), (0.5, 1), (4, 1), (1, 1), (1.1, -1)]]
    config = LossConfig(ratio="sequence", eps_low=0.2, eps_high=0.3)
    loss, stats, grad = run(config, tokens, rows=[0, 0, 3, 3, 4])
    assert loss == pytest.approx(-1 - 1 - 1.3 - 1.3 + 1.1, rel=1e-5)
    assert grad == pytest.approx([-1.0, -1.0, 0.0, 0.0, 1.1], rel=1e-5)
    assert stats["ratio"] == pytest.approx(1 + 1 + 2 + 2 + 1.1, rel=1e-5)
    assert stats["clip_frac_high"] == 2.0


@pytest.mark.parametrize(
    ("level", "weights", "masked"),
    [("token", [0.0, 0.5, 2.0, 1.0], 1), ("sequence", [0.0, 0.0, 2**0.5, 2**0.5], 2)],
)
def test_masked_tokens_have_no_loss(level: str, weights: list[float], masked: int) -> None:
    # w of row 0: 16 and 0.5, mean √8; of row 1: 2 and 1, mean √2; cap 2.1.
    tokens = [(0.0, 0.0, -LOG(w), 1.0, -1.0) for w in (16.0, 0.5, 2.0, 1.0)]
    config = LossConfig(behav_weight="mask", behav_weight_level=level, behav_weight_cap=2.1)
    config = replace(config, entropy_coef=0.1)
    loss, stats, _ = run(config, tokens, rows=[0, 0, 1, 1], kl=KLConfig(coef=2.0, estimator="k1"))
    left = 4 - masked  # masking removes the entropy bonus and the KL of 1, too
    assert loss == pytest.approx(-sum(weights) - 0.1 * 0.5 * left + 2.0 * left, rel=1e-5)
    assert stats["behav_masked_frac"] == masked
    assert stats["behav_weight"] == pytest.approx(sum(weights), rel=1e-5)
    assert "behav_capped_frac" not in stats


def test_token_with_keep_0_has_no_loss() -> None:
    tokens = [(-1.0, -1.0, -1.0, 2.0), (-1.0, -1.0, -1.0, 3.0)]
    loss, stats, grad = run(LossConfig(entropy_coef=1.0), tokens, keep=[1.0, 0.0], weight=0.5)
    assert (loss, grad) == (-1.25, [-1.0, 0.0])
    assert (stats["m2_masked_frac"], stats["weight"]) == (0.5, 1.0)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5))],
)
def test_kl_in_the_loss_has_the_value_and_slope_of_its_estimator(
    estimator: str, value: float, slope: float
) -> None:
    kl = KLConfig(coef=2.0, estimator=estimator)
    loss, stats, grad = run(LossConfig(), [(-1.0, -1.0, -1.0, 0.0, -1.5)], kl=kl)
    assert loss == pytest.approx(2.0 * value, rel=1e-5)
    assert grad[0] == pytest.approx(2.0 * slope, rel=1e-5)
    assert stats["kl_ref"] == pytest.approx(value, rel=1e-5)


def test_kl_in_the_reward_is_not_part_of_the_loss() -> None:
    loss, stats, _ = run(
        LossConfig(), [(-1.0, -1.0, -1.0, 0.0, -5.0)], kl=KLConfig(coef=2.0, place="reward")
    )
    assert loss == 0.0
    assert "kl_ref" not in stats


def test_entropy_bonus_has_a_gradient_to_the_entropy() -> None:
    entropy = torch.tensor([0.5, 2.0], requires_grad=True)
    fields = {name: torch.zeros(2) for name in ("prox_logprobs", "behav_logprobs", "advantages")}
    fields["loss_weight"] = torch.tensor([1.0, 3.0])
    batch = LossInput(
        outputs={"logprobs": torch.zeros(2), "entropy": entropy},
        rows_N=torch.arange(2),
        fields=fields,
    )
    loss, _ = make_policy_loss(LossConfig(entropy_coef=0.1))(batch)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-0.1 * 6.5)
    assert entropy.grad is not None
    assert entropy.grad.tolist() == pytest.approx([-0.1, -0.3])


def test_coupled_loss_uses_the_behaviour_policy_without_a_behaviour_weight() -> None:
    config = LossConfig(decoupled=False, eps_low=0.2, eps_high=0.2)
    loss, stats, _ = run(config, [(-1.0, -7.0, -1.0 - LOG(1.1), 1.0)])
    assert loss == pytest.approx(-1.1, rel=1e-5)
    assert not {"behav_weight", "prox_behav_abs_diff"} & set(stats)


def test_stats_are_weighted_sums() -> None:
    config = LossConfig(eps_low=0.2, eps_high=0.2, behav_weight_cap=2.0)
    tokens = [
        (LOG(0.5), 0.0, 0.0, -1.0),
        (LOG(2.0), 0.0, -LOG(4.0), 1.0),
        (0.0, 0.0, 0.0, 1.0),
        (0.0, 0.0, LOG(2.0), 1.0),
    ]
    loss, stats, _ = run(config, tokens, weight=0.25)
    expected = {
        "loss": loss,
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
    assert stats == pytest.approx(expected, abs=1e-6)


EXTREME = [(0.0, -200.0, -400.0, 0.0), (0.0, -200.0, 0.0, 1.0), (-300.0, 0.0, 0.0, -1.0)]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_extreme_ratios_give_finite_gradients(objective: str, ratio: str) -> None:
    config = LossConfig(objective=objective, ratio=ratio, behav_weight_cap=None)
    loss, _, grad = run(config, EXTREME, kl=KLConfig(coef=1.0))
    assert math.isfinite(loss)
    assert np.isfinite(grad).all()


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_loss_of_no_tokens_is_a_differentiable_zero(ratio: str) -> None:
    loss, stats, grad = run(LossConfig(ratio=ratio), [], kl=KLConfig(coef=1.0))
    assert loss == 0.0
    assert grad == []
    assert set(stats.values()) == {0.0}


# ---------------------------------------------------------------- against the naive implementation

units = st.integers(-400, 0).map(lambda n: n / 100)
drawn_tokens = st.lists(
    st.tuples(
        st.integers(0, 2), units, units, units, units, st.integers(-30, 30).map(lambda n: n / 10)
    ),
    max_size=8,
).map(lambda tokens: sorted(tokens, key=lambda token: token[0]))
configs = st.builds(
    LossConfig,
    objective=st.sampled_from(OBJECTIVES),
    ratio=st.sampled_from(["token", "sequence"]),
    # Odd digits avoid ratios at a clip bound, where the gradient is not unique.
    eps_low=st.sampled_from([0.053, 0.217, 0.511]),
    eps_high=st.sampled_from([0.053, 0.217, 0.511]),
    dual_clip=st.sampled_from([None, 1.513, 3.017]),
    decoupled=st.booleans(),
    behav_weight=st.sampled_from(["truncate", "mask"]),
    behav_weight_level=st.sampled_from(["token", "sequence"]),
    behav_weight_cap=st.sampled_from([None, 1.513, 5.017]),
    entropy_coef=st.sampled_from([0.0, 0.1]),
)
kls = st.builds(
    KLConfig,
    coef=st.sampled_from([0.0, 0.3]),
    place=st.sampled_from(["loss", "reward"]),
    estimator=st.sampled_from(["k1", "k2", "k3"]),
)


def both(config: LossConfig, kl: KLConfig, drawn: list, keep: list[float]) -> tuple:
    """Return (loss, ∂logprobs, ∂entropies) of the library in float64, and of the naive version."""
    count = len(drawn)
    weights = [0.1 + 0.05 * i for i in range(count)]
    columns = torch.tensor(drawn, dtype=torch.float64).reshape(-1, 6).T
    logprobs, entropies = columns[1].clone().requires_grad_(), (-columns[1]).requires_grad_()
    names = ("prox_logprobs", "behav_logprobs", "ref_logprobs", "advantages")
    fields = dict(zip(names, columns[2:], strict=True))
    fields["loss_weight"] = torch.tensor(weights, dtype=torch.float64)
    fields["keep"] = torch.tensor(keep[:count], dtype=torch.float64)
    outputs = {"logprobs": logprobs, "entropy": entropies}
    ours, _ = make_policy_loss(config, kl)(
        LossInput(outputs=outputs, rows_N=columns[0].long(), fields=fields)
    )
    leaves = [
        [values[i].detach().clone().requires_grad_() for i in range(count)]
        for values in (logprobs, entropies)
    ]
    tokens = [
        naive.Token(row, leaves[0][i], leaves[1][i], prox, behav, ref, a, weights[i], keep[i])
        for i, (row, _, prox, behav, ref, a) in enumerate(drawn)
    ]
    theirs = naive.policy_loss(config, kl, tokens)
    return gradients(ours, [logprobs, entropies]), gradients(theirs, [*leaves[0], *leaves[1]])


def gradients(loss: torch.Tensor, leaves: list[torch.Tensor]) -> list[float]:
    found: list[torch.Tensor | None] = [None] * len(leaves)
    if loss.requires_grad:
        found = list(torch.autograd.grad(loss, leaves, allow_unused=True))
    flat = [
        torch.zeros_like(leaf) if grad is None else grad
        for leaf, grad in zip(leaves, found, strict=True)
    ]
    return [
        float(loss.detach()),
        *torch.cat([grad.reshape(-1) for grad in flat] or [torch.empty(0)]).tolist(),
    ]


@given(
    configs, kls, drawn_tokens, st.lists(st.sampled_from([1.0, 1.0, 0.0]), min_size=8, max_size=8)
)
def test_loss_agrees_with_the_naive_implementation(
    config: LossConfig, kl: KLConfig, drawn: list, keep: list[float]
) -> None:
    ours, theirs = both(config, kl, drawn, keep)
    assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-9)


@given(configs, kls, drawn_tokens, st.randoms(use_true_random=False))
def test_loss_is_independent_of_micro_batches_and_row_order(
    config: LossConfig, kl: KLConfig, drawn: list, rng: object
) -> None:
    whole, _ = both(config, kl, drawn, [1.0] * 8)
    assume(drawn)
    weights = torch.tensor([0.1 + 0.05 * i for i in range(len(drawn))], dtype=torch.float64)
    order = sorted({token[0] for token in drawn})
    rng.shuffle(order)  # type: ignore[attr-defined]
    total = 0.0
    for row in order:
        at = [i for i, token in enumerate(drawn) if token[0] == row]
        columns = torch.tensor([drawn[i] for i in at], dtype=torch.float64).T
        names = ("prox_logprobs", "behav_logprobs", "ref_logprobs", "advantages")
        fields = dict(zip(names, columns[2:], strict=True)) | {"loss_weight": weights[at]}
        outputs = {"logprobs": columns[1], "entropy": -columns[1]}
        part = LossInput(outputs=outputs, rows_N=torch.full((len(at),), 7), fields=fields)
        total += float(make_policy_loss(config, kl)(part)[0])
    assert total == pytest.approx(whole[0], rel=1e-9, abs=1e-9)


# ---------------------------------------------------------------- the critic


def critic(
    config: CriticConfig, tokens: list[tuple[float, float, float]], weight: float = 1.0
) -> tuple[float, dict[str, float], list[float]]:
    """Return loss, stats and ∂loss/∂values of (value, old value, return) tokens."""
    columns = torch.tensor(tokens, dtype=torch.float64).T
    values = columns[0].clone().requires_grad_()
    fields = {"values": columns[1], "returns": columns[2]}
    fields["loss_weight"] = torch.full((len(tokens),), weight, dtype=torch.float64)
    rows_N = torch.zeros(len(tokens), dtype=torch.int64)
    loss, stats = make_value_loss(config)(
        LossInput(outputs={"values": values}, rows_N=rows_N, fields=fields)
    )
    (grad,) = torch.autograd.grad(loss, values)
    return float(loss.detach()), {k: float(v) for k, v in stats.items()}, grad.tolist()


@pytest.mark.parametrize(
    ("value", "old", "wanted", "loss", "grad"),
    [
        (1.1, 1.0, 2.0, 0.405, -0.9),  # within the clip: a squared error
        (1.5, 1.0, 2.0, 0.32, 0.0),  # clipped towards the return: (1.2 − 2)²
        (0.5, 1.0, 2.0, 1.125, -1.5),  # moved away: (0.5 − 2)² is larger and has a gradient
        (3.0, 1.0, 1.1, 1.805, 1.9),  # overshot
    ],
)
def test_value_loss_clips_changes_of_the_value(
    value: float, old: float, wanted: float, loss: float, grad: float
) -> None:
    got, stats, gradient = critic(CriticConfig(value_clip=0.2), [(value, old, wanted)])
    assert got == pytest.approx(loss)
    assert gradient[0] == pytest.approx(grad)
    assert stats["value_clip_frac"] == float(grad == 0.0)
    plain, stats, _ = critic(CriticConfig(value_clip=None), [(value, old, wanted)])
    assert plain == pytest.approx(0.5 * (value - wanted) ** 2)
    assert "value_clip_frac" not in stats


numbers = st.integers(-50, 50).map(lambda n: n / 10)


@given(
    st.sampled_from([None, 0.217, 1.013]),
    st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=8),
)
def test_value_loss_agrees_with_the_naive_implementation(
    bound: float | None, tokens: list[tuple[float, float, float]]
) -> None:
    config = CriticConfig(value_clip=bound)
    loss, _, grad = critic(config, tokens)
    leaves = [torch.tensor(t[0], dtype=torch.float64, requires_grad=True) for t in tokens]
    theirs = naive.make_value_loss(config, leaves, [t[1] for t in tokens], [t[2] for t in tokens])
    assert [loss, *grad] == pytest.approx(gradients(theirs, leaves), abs=1e-9)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda terms_N: terms_N.mean(), r"returned the shape \[\] for 2 tokens"),
        (lambda terms_N: terms_N[:1], r"returned the shape \[1\] for 2 tokens"),
        (lambda terms_N: None, "returned NoneType"),
        (lambda terms_N: terms_N.detach(), "without a gradient"),
    ],
)
def test_objective_that_returns_no_term_for_each_token_is_refused(
    wrong: Callable[[torch.Tensor], object], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scalar would be broadcast over the tokens, and trained with a wrong gradient."""
    monkeypatch.setattr(objectives, "_table", {**objectives._table})

    @objectives.register("wrong")
    def objective(config, ratio_N, logprobs_N, advantages_N):
        return wrong(-ratio_N * advantages_N)

    config = replace(PPO, objective="wrong", dual_clip=None)
    with pytest.raises(UserError, match=f"objective=wrong {error}|terms {error}"):
        run(config, [(0.0, 0.0, 0.0, 1.0), (0.0, 0.0, 0.0, 2.0)])
