"""SmolLM2-135M-Instruct for tests on a real model, tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "out" / "cache" / "SmolLM2-135M-Instruct"
"""The folder that tools/smollm2.py writes."""
MISSING = "SmolLM2 is not installed: make test-extras downloads it"


def smollm2() -> Path:
    """Return the model's folder; skip the test, or at import the module, if it does not exist.

    The weights are bfloat16. The folder has the tokenizer with the model's own chat template.
    """
    if not FOLDER.exists():
        pytest.skip(MISSING, allow_module_level=True)
    return FOLDER
