"""Lines that a terminal would break in mid-word, broken between words under their last column.

Apart from the commands, which all print such lines; what reads a pipe finds one row a line.
"""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from typing import TextIO

from arealite.base.printable import unguarded

ROOM, INDENT = 24, 4
"""Columns that the last field needs to be folded below itself, and the indent where it has less."""
GAP = re.compile(r"^\s+|(?<![\s.!?:])\s{2,}")
COMMAND = re.compile(r"=\S+ [\w.]+=")
"""In a row with a shell's command: broken by the terminal alone it can be copied, and runs."""


def fold(text: str, stream: TextIO | None = None) -> str:
    """Return what to print on `stream`, by default stdout: a pipe or a file gets it unchanged."""
    if not unguarded(stream or sys.stdout).isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(_fold(row, width) for row in text.split("\n"))


def _fold(row: str, width: int) -> str:
    if len(row) <= width or COMMAND.search(row):
        return row
    head = len(row) - len(GAP.split(row)[-1])
    indent = " " * (head if head + ROOM <= width else INDENT)
    return textwrap.fill(
        row, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
