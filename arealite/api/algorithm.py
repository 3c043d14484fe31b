"""Options of policy optimization, and the formulas that they name.

Presets in `config/algo/` set the options to published algorithms. The core's formulas are in
`arealite/algo/`. Shapes: N = the loss tokens of a micro-batch, or the tokens that the policy
sampled in one trajectory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Literal

from arealite.api.engine_config import OptimizerConfig
from arealite.api.fields import Constraints, named, opt, sub
from arealite.base.registry import Registry

if TYPE_CHECKING:
    import numpy as np
    import torch

KLEstimator = Literal["k1", "k2", "k3"]
Reduction = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]
CANNOT_CLIP_DUAL = ("cispo", "sapo", "reinforce", "dppo_tv", "dppo_kl")
"""Objectives without a dual clip."""
BOUNDS_DIVERGENCE = ("dppo_tv", "dppo_kl")
"""Objectives whose trust region is around the policy that sampled the token."""
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


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The policy loss: objective, correction for off-policy tokens, and reduction."""

    objective: str = named(
        "policy_objective",
        "ppo",
        "ppo clips the ratio, cispo clips its weight, sapo gates it, reinforce has none, "
        "dppo_tv and dppo_kl bound the divergence",
    )
    ratio: Literal["token", "sequence"] = opt("token", "sequence: geometric mean of a row (GSPO)")
    eps_low: float = opt(
        0.2, "lower clip range: ratio at least 1 - eps_low; dppo: divergence if A < 0", at_least=0
    )
    eps_high: float = opt(
        0.2, "upper clip range: ratio at most 1 + eps_high; dppo: divergence if A > 0", at_least=0
    )
    dual_clip: float | None = opt(None, "bound the loss at c·|A| for negative advantages", above=1)
    sapo_tau: float = opt(1.0, "SAPO's temperature for positive advantages", above=0)
    sapo_tau_neg: float = opt(1.05, "SAPO's temperature for negative advantages", above=0)
    decoupled: bool = opt(True, "recompute proximal logprobs; behaviour weight of tokens: π_p/π_b")
    behav_weight: Literal["truncate", "mask"] = opt(
        "truncate", "truncate: cap the behaviour weight (TIS); mask: no loss outside [1/cap, cap]"
    )
    behav_weight_level: Literal["token", "sequence"] = opt(
        "token", "sequence: the row's geometric mean is the behaviour weight of its tokens"
    )
    behav_weight_cap: float | None = opt(5.0, "cap of the behaviour weight; null: none", above=0)
    m2_threshold: float | None = opt(
        None, "M2PO: mask the most off-policy tokens; the mean square of the rest is below", above=0
    )
    centering: bool = opt(
        False, "score centering: subtract the sampler's expected gradient from that of each token"
    )
    entropy_coef: float = opt(0.0, "coefficient of the entropy bonus", above=-inf)
    reduction: Reduction = opt("token_mean", "reduction of token losses to a batch's loss")

    def constraints(self) -> Constraints:
        """Yield the constraints on the policy loss."""
        objective = f"objective={self.objective}"
        has_ratio = self.objective != "reinforce"
        can_clip = self.dual_clip is None or self.objective not in CANNOT_CLIP_DUAL
        yield (
            can_clip,
            f"dual_clip requires objective=ppo, not {objective}. Use dual_clip=null.",
        )
        is_corrected = self.decoupled or has_ratio
        yield (
            is_corrected,
            (
                f"{objective} has no ratio, so decoupled=false leaves off-policy tokens "
                "uncorrected. Use trainer.ppo.loss.decoupled=true."
            ),
        )
        is_ratio_used = self.ratio == "token" or has_ratio
        yield (
            is_ratio_used,
            f"ratio={self.ratio} has no effect with {objective}, which has no ratio. Use token.",
        )
        is_around_sampler = self.ratio == "token" and not self.decoupled
        yield (
            is_around_sampler or self.objective not in BOUNDS_DIVERGENCE,
            (
                f"{objective} bounds the divergence from the policy that sampled each token. "
                "Use trainer.ppo.loss.decoupled=false and trainer.ppo.loss.ratio=token."
            ),
        )
        yield from self._weight_constraints()

    def _weight_constraints(self) -> Constraints:
        """Yield the constraints on the behaviour weight of tokens."""
        masks = self.behav_weight == "mask"
        cap = self.behav_weight_cap
        has_interval = cap is not None and cap > 1
        yield (
            has_interval or not masks,
            (
                "behav_weight=mask keeps tokens in [1/cap, cap]: "
                f"behav_weight_cap={cap} must be above 1, "
                "as in trainer.ppo.loss.behav_weight_cap=5.0."
            ),
        )
        needs_decoupled = masks or self.behav_weight_level == "sequence"
        yield (
            self.decoupled or not needs_decoupled,
            (
                "behav_weight=mask and behav_weight_level=sequence require the decoupled loss. "
                "Use trainer.ppo.loss.decoupled=true, or remove them."
            ),
        )


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """The KL penalty that keeps the policy near a reference policy."""

    coef: float = opt(0.0, "coefficient; 0: no KL penalty and no reference", at_least=0)
    place: Literal["loss", "reward"] = opt("loss", "add to the loss, or to each token's reward")
    estimator: KLEstimator = opt("k3", "one-sample estimator of KL(policy ‖ reference)")
    reference: str | None = opt(None, "Hugging Face folder; initial: the initial model of the run")

    def constraints(self) -> Constraints:
        """Yield the constraints on reference and estimator."""
        is_off = self.coef == 0
        yield (
            is_off or self.reference is not None,
            (
                f"coef={self.coef} needs a reference policy. "
                "Use trainer.ppo.kl.reference=initial for the initial model of the run, "
                "or set it to a folder."
            ),
        )
        has_gradient = self.place == "reward" or self.estimator != "k1"
        yield (
            is_off or has_gradient,
            (
                "estimator=k1 has zero expected gradient in the loss. "
                "Use k2 or k3, or trainer.ppo.kl.place=reward."
            ),
        )


@dataclass(frozen=True, kw_only=True)
class ShapingConfig:
    """Reward shaping before advantages. Filters and the metrics `reward/*` use unshaped rewards."""

    scale: float = opt(1.0, "factor of every reward", above=-inf)
    clip: float | None = opt(None, "after scaling, clip each reward to ± this", above=0)
    bias: float = opt(0.0, "after clipping, add this to the last reward of an episode", above=-inf)
    overlong_buffer: int = opt(
        0, "last tokens before max_new_tokens with a growing penalty (DAPO); 0: none", at_least=0
    )
    overlong_penalty: float = opt(1.0, "largest penalty, at max_new_tokens", above=0)

    def constraints(self) -> Constraints:
        """Yield the constraint on the scale."""
        yield self.scale != 0, "scale=0 sets all rewards to 0. Use another number."


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """Advantages: of episodes relative to their group, or of tokens from discounted returns."""

    type: str = named(
        "advantage",
        "grpo",
        "grpo: (reward - group mean) / group std; dr_grpo: no division; rloo: mean of the other "
        "episodes; reinforce: discounted returns; gae: GAE with a critic",
    )
    eps: float = opt(1e-6, "added to standard deviations before division", at_least=0)
    gamma: float = opt(1.0, "discount per token of reinforce and gae", above=0, at_most=1)
    gae_lambda: float = opt(0.95, "lambda of gae", at_least=0, at_most=1)
    normalize: bool = opt(False, "normalize to mean 0 and std 1 over the batch's sampled tokens")

    @property
    def function(self) -> GroupAdvantage | TokenAdvantage:
        """The part `type`."""
        return advantages.get(self.type)

    @property
    def is_relative(self) -> bool:
        """Whether the advantage is one number for the episode, relative to its group."""
        return not isinstance(self.function, TokenAdvantage)

    @property
    def has_critic(self) -> bool:
        """Whether advantages need the values of a critic."""
        function = self.function
        return isinstance(function, TokenAdvantage) and function.has_critic


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The value model of advantage.type=gae: the policy's architecture with a scalar head.

    Each policy update is accompanied by one critic update on the same minibatch.
    """

    path: str | None = opt(None, "Hugging Face folder of the initial critic; null: model.path")
    lr: float = opt(1e-5, "learning rate after the warm-up", above=0)
    value_clip: float | None = opt(0.2, "clip range of value updates; null: no clipping", above=0)
    optimizer: OptimizerConfig = sub(OptimizerConfig, "optimizer and schedule")
