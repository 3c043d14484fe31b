"""The loss of the critic, as a weighted sum over loss tokens, and the critic's explained variance.

N = loss tokens.
"""

from __future__ import annotations

import torch

from arealite.algo.losses import Stats, weighted_sums
from arealite.api.algorithm import CriticConfig
from arealite.api.engine import LossFn, LossInput


def make_value_loss(config: CriticConfig) -> LossFn:
    """Return Σ loss_weight · ½·max((V − R)², (clip(V, V_old ± value_clip) − R)²).

    V is the head's output. Reads the fields values (V_old, before the first update), returns (R)
    and loss_weight, each float32 [N]. Source: arXiv 2005.12729, section 3.
    """

    def loss_fn(batch: LossInput) -> tuple[torch.Tensor, Stats]:
        values_N, old_N = batch.outputs["values"], batch.fields["values"]
        returns_N, weight_N = batch.fields["returns"], batch.fields["loss_weight"]
        squares_N = (values_N - returns_N).square()
        error_N = returns_N - old_N
        stats = {
            "values": old_N,
            "returns": returns_N,
            "returns_sq": returns_N.square(),
            "error": error_N,
            "error_sq": error_N.square(),
        }
        if (bound := config.value_clip) is not None:
            moved_N = values_N - old_N
            bounded_N = (old_N + moved_N.clamp(-bound, bound) - returns_N).square()
            beyond_N = moved_N.detach().abs() > bound  # else both differ by rounding
            stats["value_clip_frac"] = beyond_N & (bounded_N.detach() > squares_N.detach())
            squares_N = torch.maximum(squares_N, bounded_N)
        loss = 0.5 * (weight_N * squares_N).sum()
        return loss, weighted_sums(stats, weight_N, loss)

    return loss_fn


def explained_variance(stats: dict[str, float]) -> float:
    """Return 1 − Var(R − V_old)/Var(R) from summed stats of a value_loss function; at most 1.

    0 if all returns are equal.
    """
    total = stats["weight"] or 1.0

    def variance(name: str) -> float:
        return stats[f"{name}_sq"] / total - (stats[name] / total) ** 2

    spread = variance("returns")
    return 1.0 - variance("error") / spread if spread > 1e-12 else 0.0
