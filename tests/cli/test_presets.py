"""Presets of `config/algo/`: each is valid with any run, and sets no default value."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from arealite.api.experiment_config import ExperimentConfig
from arealite.base import config as base_config
from arealite.base import config_tree

ROOT = Path(__file__).parents[2]
PRESETS = sorted((ROOT / "config/algo").glob("*.yaml"))
ALGORITHMS = [
    "ppo",
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce",
    "reinforce_pp",
    "dapo",
    "gspo",
    "cispo",
    "sapo",
    "m2po",
    "tis",
    "mis",
    "dppo",
    "centering",
]
OF_AN_ALGORITHM = re.compile(
    r"trainer\.ppo\.(advantage|loss|kl|reward|critic)\..+|trainer\.ppo\.filter_zero_variance|"
    r"trainer\.ppo\.collector\.sampling\.top_logprobs"
)


def leaves(node: object, prefix: str = "") -> dict[str, object]:
    if not isinstance(node, dict):
        return {prefix: node}
    return {
        path: value
        for key, child in node.items()
        for path, value in leaves(child, f"{prefix}.{key}" if prefix else key).items()
    }


def test_each_algorithm_has_a_preset() -> None:
    assert {file.stem for file in PRESETS} == set(ALGORITHMS)


@pytest.mark.parametrize("file", PRESETS, ids=lambda file: file.stem)
@pytest.mark.parametrize("base", ["async_ppo", "ppo"])
def test_preset_is_valid_with_each_base_config(file: Path, base: str) -> None:
    files = [ROOT / f"config/{base}.yaml", file]
    config = base_config.load(ExperimentConfig, base_config.read_layers(files, []), {})
    config_tree.check_constraints(config.trainer.ppo, "trainer.ppo.")


@pytest.mark.parametrize("file", PRESETS, ids=lambda file: file.stem)
def test_preset_sets_only_non_default_algorithm_options(file: Path) -> None:
    defaults = {key: value for key, value, _ in config_tree.keys(ExperimentConfig)}
    settings = leaves(yaml.safe_load(file.read_text()))
    assert settings
    for key, value in settings.items():
        assert OF_AN_ALGORITHM.fullmatch(key), key
        assert value != defaults[key], f"{key} is {value} by default"
    assert len(file.read_text().splitlines()) <= 20


def test_each_preset_has_a_row_in_the_docs() -> None:
    """The row names the value of every key that the preset sets."""
    lines = (ROOT / "docs/algorithms.md").read_text().splitlines()
    for file in PRESETS:
        (line,) = [one for one in lines if one.startswith(f"| `{file.stem}` |")]
        for key in leaves(yaml.safe_load(file.read_text())):
            group, _, name = key.removeprefix("trainer.ppo.").rpartition(".")
            assert name in line or f"`{group}`:" in line, (file.stem, key)
