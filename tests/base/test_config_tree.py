"""A resolved config is written for other processes and read as the same typed tree."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import pytest

from arealite.api.experiment_config import ExperimentConfig
from arealite.base import config as base_config
from arealite.base import config_tree
from arealite.base.errors import UserError


class Colour(Enum):
    RED = "r"


@dataclass(frozen=True, kw_only=True)
class OddConfig:
    """Options of types that are not plain."""

    colour: Colour = Colour.RED
    folder: Path = Path("a")
    share: float = 1.0
    marks: bytes = b"\xff"


OVERRIDES = [
    "seed=5",
    "trainer.ppo.lr=1e-5",
    "trainer.ppo.loss.behav_weight_cap=null",
    "imports=[json]",
    "model.path='007'",
    "trainer.ppo.collector.seats.a.type=math_code_single_step",
    "trainer.ppo.collector.env.gymnasium.kwargs={a: [1, 1.0, true], b: null, c: 1e-3, d: {4: x}}",
]


def written(config: object, folder: Path) -> config_tree.Tree:
    """Write a config, and read its options."""
    file = folder / "config.msgpack"
    config_tree.write(config, file)
    return config_tree.read(file)


def test_process_reads_the_config_that_a_command_wrote(tmp_path: Path) -> None:
    config = base_config.load(ExperimentConfig, base_config.read_layers([], OVERRIDES), {})
    read = config_tree.build(ExperimentConfig, written(config, tmp_path))
    assert read == config and repr(read) == repr(config), "1, 1.0 and True are equal"


def test_options_of_foreign_parts_stay_typed(tmp_path: Path) -> None:
    grown = config_tree.extended(ExperimentConfig, {"agent": {"odd": OddConfig}})
    words = ["trainer.ppo.collector.agent.odd.share=3", "trainer.ppo.collector.seats.a.type=odd"]
    config = base_config.load(grown, base_config.read_layers([], words), {})
    read = config_tree.build(grown, written(config, tmp_path))
    assert read == config
    collector: Any = read.trainer.ppo.collector
    assert collector.agent.odd == OddConfig(share=3.0)
    assert collector.seats["a"].odd == OddConfig()


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"seed": "x"}, "seed: Expected `int`, got `str`."),
        ({"trainer": {"ppo": {"lr": [1]}}}, "trainer.ppo.lr: Expected `float`, got `array`."),
        ({"resume": None}, "resume: Expected `str`, got `null`."),
    ],
)
def test_option_of_another_type_is_refused(tree: config_tree.Tree, says: str) -> None:
    with pytest.raises(UserError) as error:
        config_tree.build(ExperimentConfig, tree)
    assert str(error.value) == says


@pytest.mark.parametrize("content", [None, b"", b"\xc1", b"seed: 1", msgspec.msgpack.encode([1])])
def test_missing_or_broken_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "config.msgpack"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=f"{file} is no resolved config: .*arealite train") as error:
        config_tree.read(file)
    assert "\n" not in str(error.value)


def test_reading_needs_neither_yaml_nor_omegaconf() -> None:
    """A role imports these modules before it reads its config."""
    code = "import sys, arealite.cli.role; print({'yaml', 'omegaconf'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
