"""Output of a benchmark: its figures as lines on the terminal and as a JSON file in out/bench."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "out" / "bench"


def show(figures: Mapping[str, Any], *, digits: int = 1) -> None:
    """Print a line for each figure."""
    for name, value in figures.items():
        number = value if isinstance(value, str) else format(value, f"12.{digits}f")
        print(f"{name:44} {number}")


def save(file: str | Path, figures: Mapping[str, Any], *, keep: bool = False) -> None:
    """Write figures as JSON, to a path or under a name in out/bench; keep: beside what is there."""
    path = FOLDER / file if isinstance(file, str) else file
    path.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(path.read_text()) if keep and path.exists() else {}
    path.write_text(json.dumps(before | dict(figures), indent=1) + "\n")
