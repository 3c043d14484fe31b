"""The page for users of TRL: both scripts run, and every name and default in its tables is right.

The tests marked `peers` need TRL (make test-peers).
"""

from __future__ import annotations

import dataclasses
import json
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from arealite.api.experiment_config import ExperimentConfig, ServerConfig
from tests.docs import tables, tutorial
from tests.docs.tables import Row

PAGE = tutorial.ROOT / "docs/from_trl.md"
TEXT = PAGE.read_text()
NOT_RUN = re.compile(r"<!-- not run: TRL .*?-->\n", re.DOTALL)
OPTION = re.compile(
    r"(trainer\.(ppo|offline|sft|dpo)|launcher|llm_server|dataset|cluster|logger)(\.\w+)+"
)
DEFAULTS = re.compile(r"\((.*)\)$")
MOST_NOISE = 0.15
"""Largest difference of two means of 256 rewards of equal models; their standard error is 0.03."""
ROWS = [row for row in tables.rows(TEXT) if row.header[-1] == "difference"]
OPTIONS = sorted({found[0] for found in OPTION.finditer(TEXT)})


def of_config(name: str) -> Any:
    """Return the default of an option of train.py or launch_llm_server."""
    for config in (ExperimentConfig(), ServerConfig()):
        try:
            return reduce(getattr, name.split("."), config)
        except AttributeError:
            continue
    raise AssertionError(f"no option is named {name}")


def defaults(row: Row) -> list[str]:
    """Return the defaults that the first cell shows: TRL's, ours; or one, or none of them."""
    found = DEFAULTS.search(row.cells[0])
    return re.split(r",\s*(?![^\[]*\])", found[1]) if found else []


def is_same(shown: str, value: Any) -> bool:
    """Return whether a default on the page is this value."""
    text = str(value).replace("'", "")
    try:
        return float(shown) == float(text)
    except ValueError:
        return shown == text


@pytest.mark.parametrize("option", OPTIONS)
def test_option_on_the_page_exists(option: str):
    of_config(option)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"line{row.line}")
def test_default_of_our_option_is_as_shown(row: Row):
    options = tables.codes(row.cells[1])
    if len(options) == 1 and len(shown := defaults(row)) == 2:
        assert is_same(shown[1], of_config(options[0])), options[0]


@pytest.mark.docs
@pytest.mark.timeout(600)
def test_page_runs_as_written(tmp_path: Path, kit: Path):
    tutorial.run(PAGE, tmp_path, kit)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
class TestPeers:
    """The other side of the page."""

    @pytest.mark.parametrize("row", ROWS, ids=lambda row: f"line{row.line}")
    def test_name_and_default_of_trl_are_as_shown(self, row: Row):
        (name,) = tables.codes(row.cells[0])
        for config in self.configs(row):
            value = self.fields(config)[name]
            shown = defaults(row)
            if shown:
                assert is_same(shown[0], value), f"{config.__name__}.{name} is {value}"
            elif options := tables.codes(row.cells[1]):
                assert is_same(str(value).replace("'", ""), of_config(options[0])), name

    def test_no_option_of_grpo_is_left_out(self):
        from trl import GRPOConfig

        old = {"vllm_importance_sampling_cap", "use_transformers_paged"}  # deprecated in 1.16
        named = set(re.findall(r"\w+", TEXT))
        assert set(GRPOConfig.__annotations__) - old - named == set()

    @pytest.mark.timeout(600)
    def test_both_scripts_begin_with_the_same_reward(self, tmp_path: Path, kit: Path):
        page = tmp_path / "from_trl.md"
        page.write_text(NOT_RUN.sub("", TEXT.partition("## What is different")[0]))
        folder = tmp_path / "reader"
        folder.mkdir()
        tutorial.run(page, folder, kit)
        printed = re.findall(r"^\[\d.*\]$", (folder / ".out").read_text(), re.MULTILINE)
        theirs, ours = map(json.loads, printed)
        assert len(theirs) == len(ours) == 4
        assert abs(theirs[0] - ours[0]) < MOST_NOISE

    @staticmethod
    def configs(row: Row) -> list[type]:
        """Return TRL's classes that a row is about."""
        import trl

        one = row.cells[0].partition(":")[0]
        names = [f"{one}Config"] if row.header[0] == "only" else row.header[0].split(", ")
        return [getattr(trl, name) for name in names]

    @staticmethod
    def fields(config: type) -> dict[str, Any]:
        """Return the default of each option."""
        found = {}
        for field in dataclasses.fields(config):
            is_made = field.default is dataclasses.MISSING
            found[field.name] = field.default_factory() if is_made else field.default  # type: ignore[misc]
        return found
