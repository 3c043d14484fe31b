"""Presets of `config/env/`: each loads, and names environments, seats and agents that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from arealite.api.agent import agents
from arealite.api.env import envs, make_env
from arealite.api.experiment_config import ExperimentConfig
from arealite.cli import configs
from arealite.impl.rollout.collector import check_seats

PRESETS = sorted((Path(__file__).parents[2] / "config/env").glob("*.yaml"))
BENCHMARKS = {"gsm8k": "math", "humaneval": "code"}
"""Environment of each preset whose rows a user gives."""


@pytest.mark.parametrize("file", PRESETS, ids=lambda file: file.stem)
def test_preset_loads_and_names_existing_environments_and_agents(file: Path) -> None:
    config = configs.load(ExperimentConfig, [file], [])
    parts = config.trainer.ppo.collector.parts
    assert BENCHMARKS.get(file.stem, file.stem) in {part.env.type for part in parts.values()}
    for part in parts.values():
        envs.check(part.env.type)
        for who in part.seats.values():
            agents.check(who.type)
        check_seats(part, make_env(config, part.env).seats)
    generates = "generated" if file.stem not in BENCHMARKS else ""
    assert "" not in parts or config.dataset.train == generates


def test_expected_presets_exist() -> None:
    assert {file.stem for file in PRESETS} >= {"tic_tac_toe", "debate"}
