"""Text for terminals: printable characters only, and wrapped rows of tables.

Control characters are replaced, so that untrusted text cannot control a terminal. `guard_output`
installs this filter on stdout and stderr, for every `print` and every logger. Rows are wrapped for
a terminal between words, indented to the last column. A pipe or a file gets each row on one line.
"""

import codecs
import re
import shutil
import sys
import textwrap
from typing import Any, TextIO

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 without tab and newline, DEL, C1, separators, bidirectional controls and lone surrogates."""
ROOM = 24
"""Least width at which the last column is wrapped below itself."""
INDENT = 4
"""Indent of the wrapped lines of a last column that is narrower than ROOM."""
GAP = re.compile(r"^\s+|(?<![\s.!?:])\s{2,}")
COMMAND = re.compile(r"=\S+ [\w.]+=")
"""Matches a row with a shell command. It is not wrapped, so that it can be copied and run."""


def printable(output: str) -> str:
    r"""Return `output` with each control character replaced by a visible escape such as \x1b."""

    def escape(match: re.Match[str]) -> str:
        return ascii(match[0])[1:-1]

    return CONTROL.sub(escape, output)


class PrintableStream(codecs.StreamWriter):
    """A text stream that replaces control characters in its output."""

    def encode(self, input: str, errors: str = "strict") -> tuple[str, int]:  # type: ignore[override]
        """Return the filtered text, and the length of `input`."""
        return printable(input), len(input)

    def isatty(self) -> bool:
        """Return False, so that libraries write no colours."""
        return False


def guard_output() -> None:
    """Install the filter on stdout and stderr of this process.

    Call it again after a library has replaced these streams; otherwise a second call is a no-op.
    """
    for name in ("stdout", "stderr"):
        setattr(sys, name, PrintableStream(unguarded(getattr(sys, name))))


def unguarded(stream: Any) -> Any:
    """Return the stream without the filter, for the program's own terminal codes."""
    return stream.stream if isinstance(stream, PrintableStream) else stream


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
