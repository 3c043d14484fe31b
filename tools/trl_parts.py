"""Parts of the benchmarks that run TRL's GRPOTrainer: its config, and a clock."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any


def trl_config(folder: Path, **own: Any) -> Any:
    """Return a config without checkpoints, logs, evaluation and gradient checkpointing."""
    from trl import GRPOConfig

    common: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "adam_beta2": 0.95,
        "beta": 0.0,
        "logging_steps": 10**6,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return GRPOConfig(**common | own)


def clock_of(ends: list[float]) -> Any:
    """Return a callback that appends the time of each step's end to `ends`."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    return Clock()
