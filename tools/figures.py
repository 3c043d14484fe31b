"""Figures of a benchmark: their output on the terminal and in out/bench, and peak memory."""

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
    replace(path, json.dumps(before | dict(figures), indent=1) + "\n")


def replace(path: Path, text: str) -> None:
    """Write a file at once: a reader never gets a part of it, also if this process is killed."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


def peak_mb() -> float:
    """Return the peak memory of this process in MB. `ru_maxrss` would include the parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
