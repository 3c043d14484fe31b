"""Group-relative advantages, one number a trajectory.

Here, without torch, because they need only headers. Groups are found by id, so that a missing or
reordered sample never mixes two prompts.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from arealite.base.errors import UserError

KINDS = ("grpo", "dr_grpo", "rloo")


def group_advantages(
    rewards: Sequence[float], groups: Sequence[Hashable], *, kind: str, eps: float
) -> list[float]:
    """Compare each reward with those of its group: R_i − mean_g, which grpo divides by std_g + eps.

    rloo takes the mean of the *other* members. `groups[i]` is the key of reward i's group, which
    has the size it really has; the std is the sample one (n − 1). A group of one, and a group of
    equal rewards, gets 0. Sources: GRPO, arXiv 2402.03300; Dr.GRPO, arXiv 2503.20783; RLOO, arXiv
    2402.14740.
    """
    if kind not in KINDS:
        raise UserError(f"Unknown advantage type '{kind}'. Known: {', '.join(KINDS)}.")
    advantages = [0.0] * len(rewards)
    for members in _members(groups):
        own = [rewards[i] for i in members]
        if max(own) == min(own):
            continue
        mean, others = math.fsum(own) / len(own), len(own) - 1
        scale = 1.0
        if kind == "grpo":
            scale = math.sqrt(math.fsum((r - mean) ** 2 for r in own) / others) + eps
        elif kind == "rloo":  # R − (n·mean − R) / (n − 1) = (R − mean) · n / (n − 1)
            scale = others / len(own)
        for i, reward in zip(members, own, strict=True):
            advantages[i] = (reward - mean) / scale
    return advantages


def group_counts(rewards: Sequence[float], groups: Sequence[Hashable]) -> dict[str, float]:
    """Count groups, groups of one, and groups of several whose rewards are all equal."""
    found = [[rewards[i] for i in members] for members in _members(groups)]
    return {
        "groups": float(len(found)),
        "groups_of_one": float(sum(len(g) == 1 for g in found)),
        "groups_zero_variance": float(sum(len(g) > 1 and max(g) == min(g) for g in found)),
    }


def _members(groups: Sequence[Hashable]) -> list[list[int]]:
    members: dict[Hashable, list[int]] = {}
    for i, key in enumerate(groups):
        members.setdefault(key, []).append(i)
    return list(members.values())
