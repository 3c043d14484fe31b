"""A file of what was skipped, for tools/skips.py: the environment variable SKIPS names it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write each skipped test, or module, and its reason; nothing where no file is named."""
    if not (file := os.environ.get("SKIPS")):
        return
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = {each.nodeid: each.longrepr[2].removeprefix("Skipped: ") for each in skipped}
    lines = [f"{name}\t{' '.join(why.split())}\n" for name, why in sorted(reasons.items())]
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text("".join(lines), "utf-8")
