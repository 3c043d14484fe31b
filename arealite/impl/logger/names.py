"""The catalogue of metric names, for whoever shows metrics: the report, the reference.

Data in names.toml, by group; beside the loggers, because it says what they write.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path


@cache
def catalogue() -> dict[str, str]:
    """Return what each metric says, by the pattern of its name: `{a,b}` is one of them, `<x>` any
    words."""
    groups = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    return {f"{group}/{name}": text for group, own in groups.items() for name, text in own.items()}


@cache
def describe(name: str) -> str | None:
    """Return what the metric `name` says; None where it is not in the catalogue."""
    found = [pattern for pattern in catalogue() if _regex(pattern).fullmatch(name)]
    exact = sorted(found, key=lambda pattern: pattern.count("<"))
    return catalogue()[exact[0]] if exact else None


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    text = re.escape(pattern)
    text = re.sub(r"\\{(.*?)\\}", lambda m: f"({m[1].replace(',', '|')})", text)
    return re.compile(re.sub(r"<\w+>", ".+", text))
