"""Score centering in float64: the exact expectation, the formula with a tail, and edge cases."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from arealite.algo.centering import centering_terms
from arealite.algo.logprobs import NO_LOGPROB
from arealite.algo.losses import make_policy_loss
from arealite.api.algorithm import KLConfig, LossConfig, objectives
from arealite.api.engine import LossInput

PLAIN = LossConfig(objective="reinforce", centering=True, behav_weight_cap=1.0)
"""w = min(π/q, 1)."""


def distributions(seed: int, vocabulary: int, *, spread: float = 1.5) -> list[Tensor]:
    """Draw logits of policy, proximal policy and sampler, float64 [V] each."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return spread * torch.randn(vocabulary, generator=generator, dtype=torch.float64)

    first = draw()
    return [first, first + 0.3 * draw(), first + draw()]


def loss_input(
    logits_V: Tensor,
    sampled_N: Tensor,
    top_ids_K: Tensor,
    *,
    prox_V: Tensor,
    behav_V: Tensor,
    advantages_N: Tensor,
    weights_N: Tensor,
) -> LossInput:
    """Return tokens that are sampled at one state, each with the same ids of H."""
    count = len(sampled_N)
    logp, prox, behav = (torch.log_softmax(z, -1) for z in (logits_V, prox_V, behav_V))
    outputs = {
        "logprobs": logp[sampled_N],
        "entropy": torch.zeros(count, dtype=logp.dtype),
        "top_logprobs": logp[top_ids_K].expand(count, -1),
    }
    fields = {
        "behav_logprobs": behav[sampled_N],
        "prox_logprobs": prox[sampled_N],
        "behav_top_logprobs": behav[top_ids_K].expand(count, -1),
        "prox_top_logprobs": prox[top_ids_K].expand(count, -1),
        "advantages": advantages_N,
        "loss_weight": weights_N,
    }
    return LossInput(outputs=outputs, rows_N=torch.arange(count), fields=fields)


configs = st.builds(
    LossConfig,
    centering=st.just(True),
    objective=st.sampled_from(["ppo", "cispo", "sapo", "reinforce", "dppo_tv", "dppo_kl"]),
    eps_low=st.sampled_from([0.053, 0.217, 0.511]),
    eps_high=st.sampled_from([0.053, 0.217, 0.511]),
    dual_clip=st.sampled_from([None, 1.513]),
    decoupled=st.booleans(),
    behav_weight=st.sampled_from(["truncate", "mask"]),
    behav_weight_cap=st.sampled_from([None, 1.213, 5.017]),
)


@given(configs, st.integers(0, 10_000), st.integers(2, 7), st.sampled_from([-1.7, 0.6]))
def test_expected_gradient_of_a_loss_with_all_ids_is_zero(
    config: LossConfig, seed: int, vocabulary: int, advantage: float
) -> None:
    """Σ_y q(y)·∇loss(y) = 0 for each objective, weight and mask, with K = |V|."""
    logits, prox, behav = distributions(seed, vocabulary)
    logits.requires_grad_()
    batch = loss_input(
        logits,
        torch.arange(vocabulary),
        torch.randperm(vocabulary, generator=torch.Generator().manual_seed(seed)),
        prox_V=prox,
        behav_V=behav,
        advantages_N=torch.full((vocabulary,), advantage, dtype=torch.float64),
        weights_N=torch.softmax(behav, -1),
    )
    loss, _ = make_policy_loss(config)(batch)
    [gradient] = torch.autograd.grad(loss, logits)
    assert gradient.abs().max() < 1e-12


def test_expected_gradient_without_centering_pulls_towards_the_sampler() -> None:
    logits, prox, behav = distributions(0, 5)
    logits.requires_grad_()
    batch = loss_input(
        logits,
        torch.arange(5),
        torch.arange(5),
        prox_V=prox,
        behav_V=behav,
        advantages_N=torch.ones(5, dtype=torch.float64),
        weights_N=torch.softmax(behav, -1),
    )
    loss, _ = make_policy_loss(replace(PLAIN, centering=False))(batch)
    [gradient] = torch.autograd.grad(loss, logits)
    assert gradient.abs().max() > 1e-2


def exact_expectation(p: Tensor, q: Tensor, weights: Tensor) -> Tensor:
    """Return Σ_y q(y)·w(y)·∇_z log p(y) = m − p·Σ m, with m = q·w, of the softmax p of z."""
    masses = q * weights
    return masses - p * masses.sum()


@given(
    st.integers(0, 10_000),
    st.integers(2, 9),
    st.sampled_from([None, 0.5, 1.0, 2.0, 5.0]),
    st.booleans(),
)
def test_gradient_with_all_ids_is_the_exact_expectation(
    seed: int, vocabulary: int, cap: float | None, masks: bool
) -> None:
    """A·C has the gradient A·Σ_y q(y)·w(y)·∇log π(y), w = clamp(π/q) or the mask of π/q."""
    logits, _, behav = distributions(seed, vocabulary)
    logits.requires_grad_()
    masks = masks and cap is not None and cap > 1
    config = replace(PLAIN, behav_weight_cap=cap, behav_weight="mask" if masks else "truncate")
    advantage = 0.7
    gradient, _ = term_gradient(config, logits, behav, torch.arange(vocabulary), advantage)
    p, q = torch.softmax(logits.detach(), -1), torch.softmax(behav, -1)
    ratio = p / q
    weights = ratio if cap is None else ratio.clamp(max=cap)
    if masks and cap is not None:
        weights = ratio * ((ratio <= cap) & (ratio >= 1 / cap))
    expected = advantage * exact_expectation(p, q, weights)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


def term_gradient(
    config: LossConfig,
    logits_V: Tensor,
    behav_V: Tensor,
    top_ids_K: Tensor,
    advantage: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ∂(A·C)/∂logits of one token in its first update, and the stats."""
    batch = loss_input(
        logits_V,
        top_ids_K[:1],
        top_ids_K,
        prox_V=logits_V.detach(),
        behav_V=behav_V,
        advantages_N=torch.tensor([advantage], dtype=torch.float64),
        weights_N=torch.ones(1, dtype=torch.float64),
    )
    terms_N, stats = centering_terms(
        config,
        objectives.get(config.objective),
        batch,
        log_ratio_N=torch.zeros(1, dtype=torch.float64),
        behav_weight_N=torch.ones(1) if config.decoupled else None,
    )
    [gradient] = torch.autograd.grad(terms_N.sum(), logits_V)
    return gradient, stats


@given(
    st.integers(0, 10_000),
    st.integers(3, 12),
    st.data(),
    st.sampled_from([(0.0, 0.8), (0.0, 2.0), (0.9, 1.3)]),
)
def test_gradient_with_a_tail_is_that_of_the_formula(
    seed: int, vocabulary: int, data: st.DataObject, bounds: tuple[float, float]
) -> None:
    """C = Σ_H sg(m − α·p)·log p, m = clamp(p, lo·q, hi·q), α = clamp(1, lo·ρ, hi·ρ)."""
    logits, _, behav = distributions(seed, vocabulary)
    logits.requires_grad_()
    size = data.draw(st.integers(1, vocabulary - 1))
    head = behav.argsort(descending=True)[:size]
    low, high = bounds
    if low:  # CISPO has both bounds, and its ratio is π/q if the loss is coupled
        config = replace(PLAIN, objective="cispo", decoupled=False)
        config = replace(config, eps_low=1 - low, eps_high=high - 1)
    else:
        config = replace(PLAIN, behav_weight_cap=high)
    gradient, stats = term_gradient(config, logits, behav, head, -1.5)

    log_p = torch.log_softmax(logits, -1)[head]
    p, q = log_p.detach().exp(), torch.softmax(behav, -1)[head]
    rho = (1 - q.sum()) / max(1 - p.sum(), torch.tensor(1e-6))
    m = torch.maximum(torch.minimum(p, high * q), low * q)
    alpha = min(max(1.0, low * float(rho)), high * float(rho))
    naive = -1.5 * ((m - alpha * p) * log_p).sum()
    [expected] = torch.autograd.grad(naive, logits)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)
    assert float(stats["centering_tail"]) == pytest.approx(float(1 - q.sum()))
    assert float(stats["centering_rho"]) == pytest.approx(float(rho))
    assert float(stats["centering_abs"]) == pytest.approx(abs(float(naive.detach())))


def test_term_without_a_weight_uses_the_sampler_itself() -> None:
    """Without importance weights m = q and α = ρ; here the weight of GSPO's row is a constant."""
    logits, _, behav = distributions(3, 6)
    logits.requires_grad_()
    head = torch.tensor([4, 0, 2])
    config = replace(PLAIN, objective="ppo", ratio="sequence", behav_weight_level="sequence")
    gradient, _ = term_gradient(config, logits, behav, head, 2.0)
    log_p = torch.log_softmax(logits, -1)[head]
    p, q = log_p.detach().exp(), torch.softmax(behav, -1)[head]
    rho = (1 - q.sum()) / (1 - p.sum())
    [expected] = torch.autograd.grad(2.0 * ((q - rho * p) * log_p).sum(), logits)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_exact_sampler_needs_no_centering() -> None:
    logits, _, _ = distributions(0, 8)
    logits.requires_grad_()
    gradient, _ = term_gradient(PLAIN, logits, logits.detach(), torch.tensor([5, 1, 7]), 3.0)
    assert gradient.abs().max() < 1e-12


@pytest.mark.parametrize("objective", ["ppo", "cispo", "sapo", "reinforce", "dppo_kl"])
@pytest.mark.parametrize("decoupled", [True, False])
def test_missing_ids_and_extreme_probabilities_give_finite_gradients(
    objective: str, decoupled: bool
) -> None:
    nothing = -math.inf
    top = torch.tensor([[-300.0, 0.0, NO_LOGPROB], [NO_LOGPROB] * 3, [-1e-9, -90.0, -99.0]])
    behav = torch.tensor([[-0.1, -200.0, nothing], [nothing] * 3, [0.0, nothing, nothing]])
    top.requires_grad_()
    zeros = torch.zeros(3)
    outputs = {"logprobs": top[:, 0], "entropy": zeros, "top_logprobs": top}
    fields = {
        "behav_logprobs": zeros - 1.0,
        "prox_logprobs": zeros - 1.0,
        "behav_top_logprobs": behav,
        "advantages": torch.tensor([1.0, -1.0, 2.0]),
        "loss_weight": zeros + 1.0,
    }
    config = LossConfig(
        objective=objective, decoupled=decoupled, centering=True, behav_weight_cap=None
    )
    batch = LossInput(outputs=outputs, rows_N=torch.arange(3), fields=fields)
    loss, stats = make_policy_loss(config)(batch)
    loss.backward()
    assert math.isfinite(float(loss.detach()))
    assert all(math.isfinite(float(value)) for value in stats.values())
    assert top.grad is not None
    assert torch.isfinite(top.grad).all()


def test_keep_and_a_masked_row_remove_the_term_but_a_masked_token_keeps_it() -> None:
    logits, _, behav = distributions(1, 4)
    behav[2] += 3.0  # π/q of the sampled token is below 1/cap
    logits.requires_grad_()
    config = replace(PLAIN, behav_weight="mask", behav_weight_cap=1.5)
    batch = loss_input(
        logits,
        torch.tensor([2, 2]),
        torch.arange(4),
        prox_V=logits.detach(),
        behav_V=behav,
        advantages_N=torch.ones(2, dtype=torch.float64),
        weights_N=torch.ones(2, dtype=torch.float64),
    )

    def gradient(config: LossConfig) -> Tensor:
        loss, _ = make_policy_loss(config)(batch)
        [gradient] = torch.autograd.grad(loss, logits, retain_graph=True)
        return gradient

    both = gradient(config)
    assert both.abs().max() > 1e-3
    assert gradient(replace(config, behav_weight_level="sequence")).abs().max() == 0.0
    batch.fields["keep"] = torch.tensor([1.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(2 * gradient(config), both)


def test_entropy_and_kl_terms_are_added_once() -> None:
    logits, prox, behav = distributions(2, 5)
    logits.requires_grad_()
    batch = loss_input(
        logits,
        torch.tensor([1]),
        torch.arange(3),
        prox_V=prox,
        behav_V=behav,
        advantages_N=torch.ones(1, dtype=torch.float64),
        weights_N=torch.ones(1, dtype=torch.float64),
    )
    batch.fields["ref_logprobs"] = batch.fields["prox_logprobs"]
    kl = KLConfig(coef=0.5, reference="initial")

    def value(config: LossConfig, kl: KLConfig) -> float:
        return float(make_policy_loss(config, kl)(batch)[0].detach())

    both = value(PLAIN, kl)
    only_centering = value(PLAIN, KLConfig())
    only_kl = value(replace(PLAIN, centering=False), kl)
    neither = value(replace(PLAIN, centering=False), KLConfig())
    assert both - only_kl == pytest.approx(only_centering - neither)
