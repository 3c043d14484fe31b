"""Reads what a Hugging Face folder says of its model, without loading it.

Here because client and servers ask the same, and neither may import the other.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any


def read_json(folder: Path | str, name: str = "config.json") -> dict[str, Any]:
    """Return a JSON file of a model's folder; {} where there is none to read."""
    with suppress(OSError, ValueError):
        return json.loads((Path(folder).expanduser() / name).read_text(encoding="utf-8"))
    return {}


def vocab_size(config: dict[str, Any]) -> int | None:
    """Return how many token ids a config.json allows: its text part's, where it has one."""
    text: dict[str, Any] = config.get("text_config") or {}
    return text.get("vocab_size") or config.get("vocab_size")
