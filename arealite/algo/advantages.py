"""Group-relative advantages, one number a trajectory.

Here, without torch, because they need only headers. Groups are found by id, so that a missing or
reordered sample never mixes two prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from arealite.api.trajectory import TrajectoryHeader
from arealite.base.errors import UserError

KINDS = ("grpo", "dr_grpo")


def group_advantages(headers: Sequence[TrajectoryHeader], *, kind: str, eps: float) -> list[float]:
    """Return R_i − mean_g for each trajectory; grpo divides by std_g + eps.

    A group is (group_id, seat) with the size it really has; the std is the sample one (n − 1). A
    group of one, and a group of equal rewards, gets 0. Sources: GRPO, arXiv 2402.03300; Dr.GRPO,
    arXiv 2503.20783.
    """
    if kind not in KINDS:
        raise UserError(f"Unknown advantage type '{kind}'. Known: {', '.join(KINDS)}.")
    advantages = [0.0] * len(headers)
    for members in _groups(headers).values():
        rewards = [headers[i].reward for i in members]
        if max(rewards) == min(rewards):
            continue
        mean = math.fsum(rewards) / len(rewards)
        scale = 1.0
        if kind == "grpo":
            variance = math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)
            scale = math.sqrt(variance) + eps
        for i, reward in zip(members, rewards, strict=True):
            advantages[i] = (reward - mean) / scale
    return advantages


def group_counts(headers: Sequence[TrajectoryHeader]) -> dict[str, float]:
    """Count groups, groups of one, and groups of several whose rewards are all equal."""
    groups = [[headers[i].reward for i in members] for members in _groups(headers).values()]
    return {
        "groups": float(len(groups)),
        "groups_of_one": float(sum(len(g) == 1 for g in groups)),
        "groups_zero_variance": float(sum(len(g) > 1 and max(g) == min(g) for g in groups)),
    }


def _groups(headers: Sequence[TrajectoryHeader]) -> dict[tuple[str, str], list[int]]:
    groups: dict[tuple[str, str], list[int]] = {}
    for i, header in enumerate(headers):
        groups.setdefault((header.group_id, header.seat), []).append(i)
    return groups
