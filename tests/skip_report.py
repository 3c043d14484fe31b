"""A report of skipped tests for tools/skips.py; the environment variable SKIPS names its file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write each skipped test or module with its reason, if SKIPS is set."""
    if not (file := os.environ.get("SKIPS")):
        return
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = {each.nodeid: each.longrepr[2].removeprefix("Skipped: ") for each in skipped}
    lines = [f"{name}\t{' '.join(why.split())}\n" for name, why in sorted(reasons.items())]
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text("".join(lines), "utf-8")
