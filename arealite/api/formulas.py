"""The formulas of policy optimization, by name: policy objectives and advantages.

The options `loss.objective` and `advantage.type` (api/algorithm.py) have these names. Shapes: N =
the loss tokens of a micro-batch, or the tokens that the policy sampled in one trajectory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from arealite.base.registry import Registry

if TYPE_CHECKING:
    import numpy as np
    import torch

    from arealite.api.algorithm import AdvantageConfig, LossConfig

Objective = Callable[
    ["LossConfig", "torch.Tensor", "torch.Tensor", "torch.Tensor"],
    "torch.Tensor",
]
"""Returns the term of each token to minimize, float32 [N], from the options of the loss, the ratio,
the logprob and the advantage of each token. Gradients flow through ratios and logprobs."""
GroupAdvantage = Callable[["AdvantageConfig", Sequence[float]], Sequence[float]]
"""Returns one advantage for each episode of a group, from the options and the episodes' rewards.
There are at least two, and they are not all equal: other groups have the advantage 0."""
TokenFormula = Callable[["AdvantageConfig", "np.ndarray", "np.ndarray", float], "np.ndarray"]
"""Returns the advantage of each token, float64 [N], from the options, rewards_N, values_N and the
value after the last token. Without a critic all values are 0."""


@dataclass(frozen=True, kw_only=True)
class TokenAdvantage:
    """An advantage of each token, from the rewards and values of its own episode."""

    formula: TokenFormula
    has_critic: bool = False
    """Whether a critic is trained. Its targets are advantage + value."""


objectives = Registry[Objective].built_in("policy_objective")
advantages = Registry[GroupAdvantage | TokenAdvantage].built_in("advantage")
