"""The names of metrics and their descriptions (metric_names.toml), for report and reference."""

import re
from functools import cache

from arealite.base.files import read_toml


@cache
def catalogue() -> dict[str, str]:
    """Return the description of each metric by the pattern of its name.

    In a pattern, `{a,b}` matches a or b, and `<x>` matches any text.
    """
    groups = read_toml(__file__, "metric_names.toml")
    return {
        f"{group}/{name}": description
        for group, metrics in groups.items()
        for name, description in metrics.items()
    }


@cache
def describe(name: str) -> str | None:
    """Return the description of the metric `name`; None if it is not in the catalogue."""
    patterns = [pattern for pattern in catalogue() if _regex(pattern).fullmatch(name)]
    if not patterns:
        return None
    most_exact = min(patterns, key=lambda pattern: pattern.count("<"))
    return catalogue()[most_exact]


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    regex = re.escape(pattern)
    regex = re.sub(r"\\{(.*?)\\}", _alternatives, regex)
    regex = re.sub(r"<\w+>", ".+", regex)
    return re.compile(regex)


def _alternatives(braces: re.Match[str]) -> str:
    """Return the regular expression for `{a,b}`."""
    return f"({braces[1].replace(',', '|')})"
