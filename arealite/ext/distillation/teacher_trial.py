"""The teacher's trial, beside the run's own. Workers import this module, so it imports no torch."""

from __future__ import annotations

from dataclasses import replace

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.trainer import PPOConfig
from arealite.ext.distillation.config import DistillationConfig

NAME = "teacher"
START_S = 600.0
"""How long a teacher of the run may load its model."""


def options_of(config: PPOConfig) -> DistillationConfig:
    """Return the section `distillation` of the options."""
    return config.distillation


def teacher_trials(config: ExperimentConfig) -> dict[str, ExperimentConfig]:
    """Return the config of each teacher's trial, by source; "" stands for all other sources."""
    trials = dict[str, ExperimentConfig]()
    folders = options_of(config.trainer.ppo).folders
    for number, source in enumerate(folders):
        name = f"{NAME}-{number}" if number else NAME
        trials[source] = _trial(config, name, folders[source])
    return trials


def _trial(config: ExperimentConfig, name: str, folder: str) -> ExperimentConfig:
    """Return the config of a teacher's trial."""
    ppo = config.trainer.ppo
    options = options_of(ppo)
    # The experts that a teacher chooses are not replayed.
    collector = replace(ppo.collector, routing="ignore")
    launcher = replace(
        config.launcher,
        llm_servers=0,
        server_args=options.server_args,
    )
    return replace(
        config,
        trial_name=f"{config.trial_name}-{name}",
        server_wait_s=max(config.server_wait_s, START_S),
        model=replace(config.model, path=folder),
        llm_server=replace(config.llm_server, addresses=options.addresses),
        launcher=launcher,
        trainer=replace(config.trainer, ppo=replace(ppo, collector=collector)),
    )
