"""Run every tutorial of docs/tutorials as written; see tutorial.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.docs import tutorial

FILES = sorted(set(tutorial.TUTORIALS.glob("*.md")) - {tutorial.TUTORIALS / "index.md"})
pytestmark = [pytest.mark.docs, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_tutorial_runs_as_written(file: Path, tmp_path: Path, request: pytest.FixtureRequest):
    wants_kit = any(each in file.read_text() for each in (tutorial.KIT, tutorial.QUICK_KIT))
    tutorial.run(file, tmp_path, request.getfixturevalue("kit") if wants_kit else tmp_path)


def skipped_blocks(file: Path) -> list[Any]:
    """List the blocks of a tutorial that are not run."""
    try:
        found = tutorial.blocks(file.read_text())
    except AssertionError:  # test_tutorial_runs_as_written reports it
        return []
    return [pytest.param(b.not_run, id=f"{file.stem}:{b.line}") for b in found if b.not_run]


@pytest.mark.parametrize("why", [each for file in FILES for each in skipped_blocks(file)])
def test_block_is_not_run(why: str):
    pytest.skip(why)
