"""The catalogue of metric names and their descriptions (names.toml), for report and reference."""

import re
from functools import cache

from arealite.base.data import read_toml


@cache
def catalogue() -> dict[str, str]:
    """Return the description of each metric by the pattern of its name.

    In a pattern, `{a,b}` matches a or b, and `<x>` matches any text.
    """
    groups = read_toml(__file__, "names.toml")
    return {f"{group}/{name}": text for group, own in groups.items() for name, text in own.items()}


@cache
def describe(name: str) -> str | None:
    """Return the description of the metric `name`; None if it is not in the catalogue."""
    found = [pattern for pattern in catalogue() if _regex(pattern).fullmatch(name)]
    exact = sorted(found, key=lambda pattern: pattern.count("<"))
    return catalogue()[exact[0]] if exact else None


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    text = re.escape(pattern)
    text = re.sub(r"\\{(.*?)\\}", lambda m: f"({m[1].replace(',', '|')})", text)
    return re.compile(re.sub(r"<\w+>", ".+", text))
