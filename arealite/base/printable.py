"""Keeps other people's text from controlling a terminal: control characters are replaced.

`guard_output` puts a filter before stdout and stderr, so no `print` and no logger can forget it.
"""

from __future__ import annotations

import codecs
import re
import sys
from typing import Any

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 without tab and newline, DEL, C1, separators, bidirectional controls and lone surrogates."""


def printable(text: str) -> str:
    r"""Return `text` with each control character as an escape that can be read, such as \x1b."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


class PrintableStream(codecs.StreamWriter):
    """A text stream that replaces control characters in everything written to it."""

    def encode(self, input: str, errors: str = "strict") -> tuple[str, int]:  # type: ignore[override]
        """Return what the stream below gets for `input`."""
        return printable(input), len(input)

    def isatty(self) -> bool:
        """Return False, so that libraries write no colours."""
        return False


def guard_output() -> None:
    """Replace control characters in whatever this process prints from now on.

    A second call changes nothing, unless a library has put its own streams in place of the filter.
    """
    for name in ("stdout", "stderr"):
        setattr(sys, name, PrintableStream(unguarded(getattr(sys, name))))


def unguarded(stream: Any) -> Any:
    """Return the text stream below the filter, for the program's own terminal codes."""
    return stream.stream if isinstance(stream, PrintableStream) else stream
