"""Folders of a run, with its vitals, without any process."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from arealite.api.experiment_config import ExperimentConfig, name_dir, run_paths
from arealite.api.trainer import PPOConfig, TrainerConfig
from arealite.api.trial import ClusterConfig
from arealite.base.config import save


def line(step: int, *, at: float | None = None, **metrics: float) -> str:
    named = {key.replace("__", "/"): value for key, value in metrics.items()}
    whole = {"step": step, "time": step if at is None else at, "reward/mean": 0.5, **named}
    return json.dumps(whole) + "\n"


class Run:
    """A run's folders, without any process."""

    def __init__(self, root: Path, **trainer: Any) -> None:
        self.config = ExperimentConfig(
            cluster=ClusterConfig(
                name_root=str(root / "names"), run_root=str(root / "runs"), ttl_s=600.0
            ),
            trainer=TrainerConfig(ppo=PPOConfig(total_steps=3), **trainer),
        )
        self.paths, self.vitals = run_paths(self.config), name_dir(self.config) / "vitals"
        self.paths.root.mkdir(parents=True)
        self.vitals.mkdir(parents=True)
        save(self.config, self.paths.config)

    def still_for(self, seconds: float) -> None:
        then = time.time() - seconds
        for file in (self.paths.config, self.paths.metrics):
            if file.exists():
                os.utime(file, (then, then))
