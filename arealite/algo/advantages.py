"""Advantages of episodes relative to their group.

Groups are identified by key, so a missing or reordered sample never mixes two prompts.
"""

import math
from collections.abc import Hashable, Sequence

from arealite.api.algorithm import AdvantageConfig, GroupAdvantage


def group_advantages(
    rewards: Sequence[float | None],
    groups: Sequence[Hashable],
    compare: GroupAdvantage,
    config: AdvantageConfig,
) -> list[float]:
    """Return the advantage of each episode relative to its group.

    Args:
        rewards: The reward of each episode. None: it has no score and takes no part in its group.
        groups: The key of each episode's group. Groups may have different sizes.
        compare: The advantages of one group.
        config: The options of `compare`.

    Returns:
        One advantage per episode; 0 without a score, in groups of one score and in groups of equal
        rewards.
    """
    advantages = [0.0] * len(rewards)
    for members in members_of_groups(groups):
        scores = dict[int, float]()
        for index in members:
            score = rewards[index]
            if score is not None:
                scores[index] = score
        if len({*scores.values()}) < 2:
            continue
        group = compare(config, [*scores.values()])
        for index, advantage in zip(scores, group, strict=True):
            advantages[index] = advantage
    return advantages


def grpo(config: AdvantageConfig, scores: Sequence[float]) -> list[float]:
    """Return (R − mean) / (std + eps), with the sample standard deviation (arXiv 2402.03300)."""
    centred = deviations(scores)
    squares = math.fsum(deviation**2 for deviation in centred)
    scale = math.sqrt(squares / (len(scores) - 1)) + config.eps
    return [deviation / scale for deviation in centred]


def dr_grpo(_config: AdvantageConfig, scores: Sequence[float]) -> list[float]:
    """Return R − mean (arXiv 2503.20783)."""
    return deviations(scores)


def deviations(scores: Sequence[float]) -> list[float]:
    """Return R − mean."""
    mean = math.fsum(scores) / len(scores)
    return [score - mean for score in scores]


def members_of_groups(groups: Sequence[Hashable]) -> list[list[int]]:
    """Return the indices of the episodes of each group."""
    members: dict[Hashable, list[int]] = {}
    for index, key in enumerate(groups):
        members.setdefault(key, []).append(index)
    return list(members.values())
