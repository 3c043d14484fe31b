"""The child process of a part of tools/gpu_day.py: its options, and the numbers that it reports."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools import figures


@dataclass
class PartRun:
    """The options of a part, and the numbers that it has measured so far."""

    out: Path
    """JSON file for the numbers."""
    scratch: Path
    """Folder for models and runs; the parts share it."""
    device: str
    """cpu or cuda."""
    quick: bool
    numbers: dict[str, Any] = field(default_factory=dict[str, Any])

    def report(self, name: str, value: Any) -> None:
        """Print a number, and write all: a part that is killed keeps what it has measured."""
        self.numbers[name] = value
        print(f"{name}: {value}", flush=True)
        figures.save(self.out, self.numbers)


def parse_part(description: str) -> PartRun:
    """Parse the command line of a part."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--scratch", type=Path, required=True, help="folder for models and runs")
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--quick", action="store_true", help="tiny shapes")
    options = parser.parse_args()
    return PartRun(
        out=options.out, scratch=options.scratch, device=options.device, quick=options.quick
    )
