"""Fixtures of the tests of commands: the tiny model is made once for all of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.models import tiny_model


@pytest.fixture(scope="session")
def unchanged_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model that no test changes."""
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def model(unchanged_model: Path, tmp_path: Path) -> Path:
    """Return `model` in the folder of a test: a copy of the tiny model, which it may change."""
    return shutil.copytree(unchanged_model, tmp_path / "model")
