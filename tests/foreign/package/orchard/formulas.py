"""A policy objective and an advantage."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from arealite.api.algorithm import AdvantageConfig
from arealite.api.fields import opt
from orchard import trace


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Options of the objective."""

    strength: float = opt(1.0, "factor of all terms", above=0)


def objective(
    config: Any, ratio_N: torch.Tensor, logprobs_N: torch.Tensor, advantages_N: torch.Tensor
) -> torch.Tensor:
    """Return −strength·u·A of each token."""
    strength = config.apple_objective.strength
    trace("objective", strength)
    return -strength * ratio_N * advantages_N


def rank(config: AdvantageConfig, rewards: Sequence[float]) -> list[float]:
    """Return the rank of each reward in its group, around 0."""
    trace("advantage", len(rewards))
    ordered = sorted(rewards)
    middle = (len(rewards) - 1) / 2
    return [ordered.index(reward) - middle for reward in rewards]
