"""Replaces control characters in all output, so that foreign text cannot control a terminal.

`guard_output` puts the filter before stdout and stderr, for every `print` and every logger.
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
        """Return the filtered text, and the length of `input`."""
        return printable(input), len(input)

    def isatty(self) -> bool:
        """Return False, so that libraries write no colours."""
        return False


def guard_output() -> None:
    """Replace control characters in all that this process writes to stdout and stderr from now on.

    Call it again after a library has replaced these streams; else a second call is a no-op.
    """
    for name in ("stdout", "stderr"):
        setattr(sys, name, PrintableStream(unguarded(getattr(sys, name))))


def unguarded(stream: Any) -> Any:
    """Return the stream below the filter, for terminal codes of the program itself."""
    return stream.stream if isinstance(stream, PrintableStream) else stream
