"""Wrap long lines of a table for a terminal: between words, indented to the last column.

A pipe or a file gets each row on one line.
"""

import re
import shutil
import sys
import textwrap
from typing import TextIO

from arealite.base.printable import unguarded

ROOM = 24
"""Least width at which the last column is wrapped below itself."""
INDENT = 4
"""Indent of the wrapped lines of a last column that is narrower than ROOM."""
GAP = re.compile(r"^\s+|(?<![\s.!?:])\s{2,}")
COMMAND = re.compile(r"=\S+ [\w.]+=")
"""Matches a row with a shell command. It is not wrapped, so that it can be copied and run."""


def fold(rows: str, stream: TextIO | None = None) -> str:
    """Wrap rows for `stream`, by default stdout; return them unchanged for a pipe or a file."""
    if not unguarded(stream or sys.stdout).isatty():
        return rows
    width = shutil.get_terminal_size().columns
    return "\n".join(_fold(row, width) for row in rows.split("\n"))


def _fold(row: str, width: int) -> str:
    if len(row) <= width or COMMAND.search(row):
        return row
    last_column = GAP.split(row)[-1]
    column_start = len(row) - len(last_column)
    indent = column_start if column_start + ROOM <= width else INDENT
    return textwrap.fill(
        row,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
