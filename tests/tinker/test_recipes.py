"""Recipes of tinker-cookbook, with unchanged files, against a service."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tinker.conftest import HUB_NAME, RunningService

pytestmark = pytest.mark.tinker

STEPS = 2
LOSS = "loss_fn=importance_sampling"
"""In place of stable_reinforce, which the service does not have."""
RECIPES = {
    "sl_loop": ["batch_size=4", "max_length=256"],
    "rl_loop": ["batch_size=2", "group_size=4", "max_tokens=8", "loss_fn=gspo"],
    "chat_sl.train": ["batch_size=4", "max_length=256", "behavior_if_log_dir_exists=delete"],
    "math_rl.train": [
        "env=arithmetic",
        "groups_per_batch=2",
        "group_size=4",
        "max_tokens=4",
        LOSS,
        "behavior_if_log_dir_exists=delete",
    ],
    "preference.dpo.train": [
        "dataset=hhh",
        "batch_size=4",
        "max_length=256",
        "behavior_if_log_dir_exists=delete",
    ],
    "distillation.on_policy_distillation": [
        f"teacher_model={HUB_NAME}",
        "groups_per_batch=2",
        "group_size=2",
        "max_tokens=8",
        "behavior_if_log_dir_exists=delete",
    ],
}
"""The options of each recipe: small batches and short answers."""


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_runs_unchanged(recipe: str, recipes: RunningService, tmp_path: Path) -> None:
    log_path = tmp_path / "log"
    recipes.run(
        "-m",
        f"tinker_cookbook.recipes.{recipe}",
        f"base_url={recipes.address}",
        f"model_name={HUB_NAME}",
        f"log_path={log_path}",
        "max_steps=" + str(STEPS),
        *RECIPES[recipe],
    )

    steps = [json.loads(line) for line in (log_path / "metrics.jsonl").read_text().splitlines()]
    assert len([step for step in steps if "progress/batch" in step or "step" in step]) >= STEPS
    saved = (log_path / "checkpoints.jsonl").read_text()
    assert "tinker://" in saved
