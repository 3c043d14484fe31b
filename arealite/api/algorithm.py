"""The options of policy optimization: what an algorithm of the literature sets, and nothing else.

A preset in `config/algo/` is a few of these lines. Formulas stand in `arealite/algo/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from arealite.api.engine_config import OptimizerConfig
from arealite.api.fields import Constraints, opt, sub

KLEstimator = Literal["k1", "k2", "k3"]
Reduction = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The policy loss: an objective of the ratio, a correction for the sampler's policy, a mean."""

    objective: Literal["ppo", "cispo", "sapo", "reinforce"] = opt(
        "ppo", "clip the ratio, clip its weight, gate it softly, or take none"
    )
    ratio: Literal["token", "sequence"] = opt("token", "sequence: its geometric mean (GSPO)")
    eps_low: float = opt(0.2, "the ratio is clipped to 1 - eps_low …", at_least=0)
    eps_high: float = opt(0.2, "… 1 + eps_high; above eps_low is DAPO's clip-higher", at_least=0)
    dual_clip: float | None = opt(None, "bound the loss at c·|A| for negative advantages", above=1)
    sapo_tau: float = opt(1.0, "temperature of SAPO's gate for positive advantages", above=0)
    sapo_tau_neg: float = opt(1.05, "and for negative ones", above=0)
    decoupled: bool = opt(
        True, "proximal policy recomputed by the trainer, behaviour ratio as a weight"
    )
    behav_weight: Literal["truncate", "mask"] = opt(
        "truncate", "above the cap (TIS), or no loss outside [1/cap, cap] (MIS)"
    )
    behav_weight_level: Literal["token", "sequence"] = opt(
        "token", "sequence: the geometric mean of a row"
    )
    behav_weight_cap: float | None = opt(5.0, "upper bound of that weight; null leaves it", above=0)
    m2_threshold: float | None = opt(
        None, "M2PO: tokens farthest off policy get no loss until the mean square is below", above=0
    )
    entropy_coef: float = opt(0.0, "of the entropy bonus", above=-inf)
    reduction: Reduction = opt("token_mean", "how token losses add up to a batch's loss")

    def constraints(self) -> Constraints:
        """Yield the constraints on the policy loss."""
        cap, masks = self.behav_weight_cap, self.behav_weight == "mask"
        objective, is_plain = f"objective={self.objective}", self.objective == "reinforce"
        yield (
            self.dual_clip is None or self.objective == "ppo",
            f"dual_clip is of objective=ppo; {objective} has no such bound. Use null.",
        )
        yield (
            self.decoupled or not is_plain,
            f"{objective} takes no ratio: with decoupled=false nothing corrects for the sampler's "
            "policy. Use trainer.ppo.loss.decoupled=true.",
        )
        yield (
            self.ratio == "token" or not is_plain,
            f"ratio={self.ratio}: {objective} takes none. Use token.",
        )
        yield (
            not masks or (cap is not None and cap > 1),
            f"behav_weight=mask keeps tokens in [1/cap, cap]: behav_weight_cap={cap} must be "
            "above 1, as in trainer.ppo.loss.behav_weight_cap=5.0.",
        )
        yield (
            self.decoupled or not (masks or self.behav_weight_level == "sequence"),
            "behav_weight and behav_weight_level are of the decoupled loss. Use "
            "trainer.ppo.loss.decoupled=true, or leave them out.",
        )


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """Keeps the policy near a reference policy."""

    coef: float = opt(0.0, "0 needs no reference", at_least=0)
    place: Literal["loss", "reward"] = opt("loss", "a term of the loss, or of each token's reward")
    estimator: KLEstimator = opt("k3", "of KL(policy ‖ reference) from one sample")
    reference: str | None = opt(
        None, "Hugging Face folder of the reference; initial: the model the run begins with"
    )

    def constraints(self) -> Constraints:
        """Yield the constraints on the distance to the reference."""
        yield (
            self.coef == 0 or self.reference is not None,
            f"coef={self.coef} needs a reference policy. Use trainer.ppo.kl.reference=initial for "
            "the model that the run begins with, or give a folder.",
        )
        yield (
            self.coef == 0 or self.place == "reward" or self.estimator != "k1",
            "estimator=k1 has no gradient on average in the loss. Use k2 or k3, or "
            "trainer.ppo.kl.place=reward.",
        )


@dataclass(frozen=True, kw_only=True)
class ShapingConfig:
    """What becomes of rewards before advantages; filters and `reward/*` see them as they came."""

    scale: float = opt(1.0, "every reward is multiplied by this …", above=-inf)
    clip: float | None = opt(None, "… clipped to ± this …", above=0)
    bias: float = opt(0.0, "… and the last one of an episode gets this added", above=-inf)
    overlong_buffer: int = opt(
        0, "tokens before max_new_tokens over which a penalty grows (DAPO); 0: none", at_least=0
    )
    overlong_penalty: float = opt(1.0, "at its end", above=0)

    def constraints(self) -> Constraints:
        """Yield the constraint on the scale."""
        yield self.scale != 0, "scale=0 takes all reward away. Use another number."


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """Advantages: relative to a group of episodes of one task, or of returns token by token."""

    type: Literal["grpo", "dr_grpo", "rloo", "reinforce", "gae"] = opt(
        "grpo",
        "of the group: over its std, less its mean, less the others' mean; or the discounted "
        "return, or GAE with a critic",
    )
    eps: float = opt(1e-6, "added to a std", at_least=0)
    gamma: float = opt(1.0, "discount a token, of reinforce and gae", above=0, at_most=1)
    gae_lambda: float = opt(0.95, "of gae", at_least=0, at_most=1)
    normalize: bool = opt(False, "to mean 0 and std 1 over the sampled tokens of the batch")

    @property
    def is_relative(self) -> bool:
        """Whether an episode is compared with the others of its task, as a whole."""
        return self.type in ("grpo", "dr_grpo", "rloo")


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The value model of advantage.type=gae: the policy's architecture with a head of one number.

    It is updated as often as the policy, on the same minibatches.
    """

    path: str | None = opt(None, "Hugging Face folder it begins with; null takes model.path")
    lr: float = opt(1e-5, "learning rate after the warm-up", above=0)
    value_clip: float | None = opt(0.2, "how far an update may move a value; null: any", above=0)
    optimizer: OptimizerConfig = sub(OptimizerConfig, "optimizer and schedule")
