"""Combinations of the algorithm's options that make no sense, each refused with its fix.

Apart from the other checks, because they need only the numbers; and refused, because an option that
has no effect, or one that nobody wants, is a typo that costs a run.
"""

from __future__ import annotations

from collections.abc import Iterator

from arealite.api.trainer import PPOConfig
from arealite.base.errors import UserError

Rule = tuple[bool, str]
"""Whether it holds, and what to say after `trainer.ppo.` where it does not."""


def check_algorithm(ppo: PPOConfig) -> None:
    """Raise UserError with the first rule that the options break."""
    for rules in (loss_rules, kl_rules, reward_rules, advantage_rules):
        for holds, text in rules(ppo):
            if not holds:
                raise UserError(f"trainer.ppo.{text}")


def loss_rules(ppo: PPOConfig) -> Iterator[Rule]:
    """Yield what must hold for the policy loss."""
    loss, objective = ppo.loss, f"objective={ppo.loss.objective}"
    yield (
        loss.dual_clip is None or loss.objective == "ppo",
        f"loss.dual_clip is of objective=ppo; {objective} has no such bound. Use null.",
    )
    if loss.objective == "reinforce":
        yield (
            loss.decoupled,
            f"loss.{objective} takes no ratio: with decoupled=false nothing corrects for the "
            "sampler's policy. Use trainer.ppo.loss.decoupled=true.",
        )
        yield loss.ratio == "token", f"loss.ratio={loss.ratio}: {objective} takes none. Use token."
    cap, masks = loss.behav_weight_cap, loss.behav_weight == "mask"
    yield (
        not masks or (cap is not None and cap > 1),
        f"loss.behav_weight=mask keeps tokens in [1/cap, cap]: behav_weight_cap={cap} must be "
        "above 1, as in trainer.ppo.loss.behav_weight_cap=5.0.",
    )
    yield (
        loss.decoupled or not (masks or loss.behav_weight_level == "sequence"),
        "loss.behav_weight and behav_weight_level are of the decoupled loss. Use "
        "trainer.ppo.loss.decoupled=true, or leave them out.",
    )


def kl_rules(ppo: PPOConfig) -> Iterator[Rule]:
    """Yield what must hold for the distance to the reference."""
    kl = ppo.kl
    yield (
        kl.coef == 0 or kl.reference is not None,
        f"kl.coef={kl.coef} needs a reference policy. Use trainer.ppo.kl.reference=initial for the "
        "model that the run begins with, or give a folder.",
    )
    yield (
        kl.coef == 0 or kl.place == "reward" or kl.estimator != "k1",
        "kl.estimator=k1 has no gradient on average in the loss. Use k2 or k3, or "
        "trainer.ppo.kl.place=reward.",
    )


def reward_rules(ppo: PPOConfig) -> Iterator[Rule]:
    """Yield what must hold for the shaping of rewards."""
    reward, limit = ppo.reward, ppo.collector.sampling.max_new_tokens
    yield reward.scale != 0, "reward.scale=0 takes all reward away. Use another number."
    yield (
        reward.overlong_buffer <= limit,
        f"reward.overlong_buffer={reward.overlong_buffer} must be at most "
        f"collector.sampling.max_new_tokens={limit}, before which it lies.",
    )


def advantage_rules(ppo: PPOConfig) -> Iterator[Rule]:
    """Yield what must hold for advantages and their critic."""
    advantage, critic, group = ppo.advantage, ppo.critic, ppo.collector.group_size
    kind = f"advantage.type={advantage.type}"
    yield (
        group > 1 or not advantage.is_relative,
        f"{kind} compares an episode with others of its task, but collector.group_size is 1. Use "
        "at least 2, or trainer.ppo.advantage.type=reinforce or gae.",
    )
    yield (
        group > 1 or not ppo.filter_zero_variance,
        "filter_zero_variance would leave out every group of collector.group_size 1. Use "
        "trainer.ppo.filter_zero_variance=false, or a larger group.",
    )
    yield (
        advantage.gamma == 1 or not advantage.is_relative,
        f"advantage.gamma={advantage.gamma} discounts nothing in {kind}, which takes an episode "
        "as a whole. Use trainer.ppo.advantage.gamma=1, or type=reinforce or gae.",
    )
    yield (
        critic.path is None or advantage.type == "gae",
        f"critic.path is set, but {kind} has no critic. Use trainer.ppo.advantage.type=gae.",
    )
