"""The page "Adapters" runs as written; see tutorial.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import tutorial


@pytest.mark.docs
@pytest.mark.timeout(900)
def test_page_runs_as_written(tmp_path: Path, kit: Path) -> None:
    tutorial.run(tutorial.ROOT / "docs/adapters.md", tmp_path, kit, is_notebook=True)
