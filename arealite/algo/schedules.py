"""Learning-rate schedules as a pure function of the update number.

Here so that resuming needs one integer and nothing else.
"""

from __future__ import annotations

import math

from arealite.api.engine_config import OptimizerConfig


def learning_rate(update: int, *, lr: float, total: int, config: OptimizerConfig) -> float:
    """Return the learning rate of optimizer update `update` (the first is 0).

    Linear warm-up over `warmup_steps` updates, the first already at lr / warmup_steps; then
    constant, or a linear or cosine decay that reaches lr · min_lr_ratio at the last of `total`
    updates and stays there.
    """
    warmup = config.warmup_steps
    if update < warmup:
        return lr * (update + 1) / warmup
    if config.schedule == "constant":
        return lr
    done = min(1.0, (update - warmup) / max(1, total - 1 - warmup))
    share = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)
