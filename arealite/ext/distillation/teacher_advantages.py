"""The teacher's scores in the trainer: advantages of tokens, and the distance to the teacher."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.hooks import AdvantageChange, StepMetrics
from arealite.api.trainer import PPOConfig
from arealite.ext.distillation.config import DistillationConfig
from arealite.ext.distillation.teacher_scores import FIELD
from arealite.ext.distillation.teacher_trial import options_of
from arealite.ext.distillation.token_divergence import add_top_tokens
from arealite.impl.trainer.batch import TrainBatch, Trajectory
from arealite.impl.trainer.rank_group import World


def distillation(config: PPOConfig) -> AdvantageChange | None:
    """Return what adds the scores to advantages; None without. Hook `advantage_change`."""
    options = options_of(config)
    return partial(with_teacher, options) if options.is_on else None


def with_teacher(
    options: DistillationConfig, trajectory: Trajectory, advantages: np.ndarray | float
) -> np.ndarray | float:
    """Return advantages with coef · (log π_teacher − log π_behav) of each sampled token [N].

    In expectation this is −coef times the reverse KL divergence of the token (sampled reverse KL,
    without a discount: each token answers for itself). A trajectory without scores, from before
    the option was set, keeps its advantages.
    """
    kl_N = reverse_kl(trajectory)
    if options.top_k:
        add_top_tokens(trajectory, options.top_k)
    if kl_N is None or not trajectory.is_scored:
        return advantages
    reward_part = 0.0 if options.only else advantages
    if options.top_k:
        return reward_part  # the loss has the teacher's term
    return reward_part - options.coef * kl_N


def reverse_kl(trajectory: Trajectory) -> np.ndarray | None:
    """Return log π_behav − log π_teacher of each sampled token, float64 [N]; None: no scores."""
    raw_scores = b""
    for segment in trajectory.segments:
        for turn in segment.turns:
            if FIELD not in turn.node.extras:
                return None
            raw_scores += turn.node.extras[FIELD]
    teacher_N = np.frombuffer(raw_scores, "<f4")
    return trajectory.gather("behav_logprobs") - teacher_N


def metrics(config: ExperimentConfig, world: World) -> StepMetrics | None:
    """Return what measures the distance to the teacher. Hook `step_metrics`."""
    return partial(distance, world) if options_of(config.trainer.ppo).is_on else None


def distance(world: World, batch: TrainBatch, _: Any) -> Mapping[str, float]:
    """Return the mean of log π_behav − log π_teacher over the sampled tokens of all ranks."""
    sums = np.zeros(2)
    for trajectory in batch.local:
        kl_N = reverse_kl(trajectory)
        if kl_N is not None:
            sums += kl_N.sum(), len(kl_N)
    total, num_tokens = world.add(sums)
    return {"distillation/reverse_kl": float(total / max(num_tokens, 1.0))}
