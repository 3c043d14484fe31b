"""Naive losses, token by token in float64, from the papers' formulas.

Slow and independent of `arealite/algo`; hypothesis tests compare both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from arealite.api.algorithm import CriticConfig, KLConfig, LossConfig

Scalar = torch.Tensor
CLAMP = 20.0


@dataclass
class Token:
    """One loss token; `logprob` and `entropy` are leaves of the graph."""

    row: int
    logprob: Scalar
    entropy: Scalar
    prox: float
    behav: float
    ref: float
    advantage: float
    weight: float
    keep: float = 1.0


def policy_loss(config: LossConfig, kl: KLConfig, tokens: list[Token]) -> Scalar:
    """Return the loss as a float64 scalar with its graph."""
    total = torch.zeros((), dtype=torch.float64)
    for token in tokens:
        mates = [mate for mate in tokens if mate.row == token.row]
        weight, kept = behav_weight(config, token, mates)
        if not kept or not token.keep:
            continue
        term = weight * objective(config, token, mates)
        if config.entropy_coef:
            term = term - config.entropy_coef * token.entropy
        if kl.coef and kl.place == "loss":
            term = term + kl.coef * kl_estimate(token.logprob - token.ref, kl.estimator)
        total = total + token.weight * term
    return total


def objective(config: LossConfig, token: Token, mates: list[Token]) -> Scalar:
    a, logprob = token.advantage, token.logprob
    if config.objective == "reinforce":
        return -a * logprob

    def old(one: Token) -> float:
        return one.prox if config.decoupled else one.behav

    u = ratio(config.ratio, token, mates, lambda one: one.logprob - old(one))
    if config.objective == "sapo":
        tau = config.sapo_tau if a > 0 else config.sapo_tau_neg
        return -(4.0 / tau) / (1.0 + torch.exp(-tau * (u - 1.0))) * a
    if config.objective in ("dppo_tv", "dppo_kl"):
        return -dppo_weight(config, number(u), number(torch.exp(logprob)), a) * a * logprob
    low, high = 1.0 - config.eps_low, 1.0 + config.eps_high
    clipped = min(max(number(u), low), high)
    if config.objective == "cispo":
        return -clipped * a * logprob
    gain = u * a if number(u) * a <= clipped * a else exact(clipped * a)
    if a < 0 and config.dual_clip is not None and number(gain) < config.dual_clip * a:
        gain = exact(config.dual_clip * a)
    return -gain


def dppo_weight(config: LossConfig, r: float, pi: float, a: float) -> float:
    """Return M·min(r, 20): equations 11 to 14 of arXiv 2602.04879, with the bound of its code."""
    mu = pi / r
    if config.objective == "dppo_tv":
        divergence = abs(mu - pi)
    else:
        rest_mu, rest_pi = max(1 - mu, 1e-8), max(1 - pi, 1e-8)
        divergence = mu * math.log(mu / pi) + rest_mu * math.log(rest_mu / rest_pi)
    leaves_up = a > 0 and r > 1 and divergence > config.eps_high
    leaves_down = a < 0 and r < 1 and divergence > config.eps_low
    return 0.0 if leaves_up or leaves_down else min(r, 20.0)


def behav_weight(config: LossConfig, token: Token, mates: list[Token]) -> tuple[float, bool]:
    if not config.decoupled:
        return 1.0, True
    level = config.behav_weight_level
    w = number(ratio(level, token, mates, lambda one: exact(one.prox - one.behav)))
    cap = config.behav_weight_cap
    if cap is None:
        return w, True
    if config.behav_weight == "truncate":
        return min(w, cap), True
    return w, 1.0 / cap <= w <= cap


def ratio(level: str, token: Token, mates: list[Token], log: Callable[[Token], Scalar]) -> Scalar:
    logs = [log(mate) for mate in mates] if level == "sequence" else [log(token)]
    mean = sum(logs, torch.zeros((), dtype=torch.float64)) / len(logs)
    if abs(number(mean)) > CLAMP:
        mean = exact(CLAMP if number(mean) > 0 else -CLAMP)
    return torch.exp(mean)


def kl_estimate(log_ratio: Scalar, kind: str) -> Scalar:
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio**2 / 2
    return torch.exp(-log_ratio) - 1 + log_ratio


def make_value_loss(
    config: CriticConfig, values: list[Scalar], olds: list[float], returns: list[float]
) -> Scalar:
    """Return the critic's loss of tokens of weight 1."""
    total = torch.zeros((), dtype=torch.float64)
    for value, old, wanted in zip(values, olds, returns, strict=True):
        square = (value - wanted) ** 2
        bound = config.value_clip
        if bound is not None:
            near = value if abs(number(value) - old) <= bound else None
            edge = old + bound if number(value) > old else old - bound
            bounded = square if near is not None else exact((edge - wanted) ** 2)
            square = square if number(square) >= number(bounded) else bounded
        total = total + square / 2
    return total


def exact(value: float) -> Scalar:
    return torch.tensor(value, dtype=torch.float64)


def number(value: Scalar) -> float:
    return float(value.detach())
