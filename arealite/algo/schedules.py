"""Learning-rate schedules as functions of the update number, the only state to resume from."""

import math

from arealite.api.engine_config import OptimizerConfig


def learning_rate(
    update: int,
    *,
    lr: float,
    total: int,
    config: OptimizerConfig,
) -> float:
    """Return the learning rate of an optimizer update.

    A linear warm-up over `warmup_steps` updates begins at lr / warmup_steps. Then the rate is
    constant, or a linear or cosine decay reaches lr · min_lr_ratio at the last update.

    Args:
        update: Number of the update, from 0.
        lr: The learning rate after the warm-up.
        total: Number of updates; later ones keep the last rate.
        config: Options of the schedule.
    """
    warmup = config.warmup_steps
    if update < warmup:
        return lr * (update + 1) / warmup
    if config.schedule == "constant":
        return lr
    num_decays = max(1, total - 1 - warmup)
    progress = min(1.0, (update - warmup) / num_decays)
    if config.schedule == "linear":
        share = 1.0 - progress
    else:
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    min_ratio = config.min_lr_ratio
    return lr * (min_ratio + (1.0 - min_ratio) * share)
