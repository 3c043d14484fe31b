"""Replace control characters in all output, so that untrusted text cannot control a terminal.

`guard_output` installs the filter on stdout and stderr, for every `print` and every logger.
"""

import codecs
import re
import sys
from typing import Any

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 without tab and newline, DEL, C1, separators, bidirectional controls and lone surrogates."""


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
