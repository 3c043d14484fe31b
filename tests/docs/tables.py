"""The tables of a Markdown page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

DIVIDER = re.compile(r"\|(\s*:?-+:?\s*\|)+")
CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Row:
    """A row of a table, with the heading and the line above the table."""

    line: int
    section: str
    header: tuple[str, ...]
    cells: tuple[str, ...]


def rows(text: str) -> Iterator[Row]:
    """Yield the rows of all tables of a page in their order."""
    section, header, is_code = "", (), False
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if line.startswith("```"):
            is_code = not is_code
        if is_code or not line.startswith("|"):
            header = ()
            section = line.lstrip("# ") if line.startswith("#") and not is_code else section
        elif DIVIDER.fullmatch(line):
            header = cells(lines[number - 2])
        elif header:
            yield Row(number, section, header, cells(line))


def cells(line: str) -> tuple[str, ...]:
    """Return the cells of a line; a `|` between backticks does not end a cell."""
    pieces = re.findall(r"(?:`[^`]*`|[^|`])*(?=\|)", line.strip()[1:])
    return tuple(piece.strip() for piece in pieces[::2])


def codes(cell: str) -> list[str]:
    """Return the texts between backticks."""
    return CODE.findall(cell)
