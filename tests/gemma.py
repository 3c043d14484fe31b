"""Gemma 3's own tokenizer for tests."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "out" / "cache" / "gemma-3-tokenizer"
"""The folder that tools/gemma.py writes."""
MISSING = "Gemma's tokenizer is not installed: make test-extras downloads it"


def gemma() -> Path:
    """Return the folder of the tokenizer; skip the test if it does not exist."""
    if not FOLDER.exists():
        pytest.skip(MISSING)
    return FOLDER
