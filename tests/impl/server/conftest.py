from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import tiny_model


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three tiny Qwen2 folders of one shape, with different weights."""
    root = tmp_path_factory.mktemp("server-models")
    return [tiny_model(root / f"m{seed}", seed=seed) for seed in range(3)]
