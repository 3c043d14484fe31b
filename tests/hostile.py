"""Text with control sequences that rename a terminal's window, clear it and set colours."""

from __future__ import annotations

import re

HOSTILE = "ev\x1b]0;owned\x07\x1b[2J\x9b31m\u202eil"
SHOWN_FIRST = r"ev\x1b]0;owned"
SHOWN = r"ev\x1b]0;owned\x07\x1b[2J"
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
RICH = re.compile(r"\x1b\[(\d+(;\d+)*m|1A|2K)|\r")
"""Control sequences of the panel: colours, one line up, erase a line, return."""


def controls_in(text: str) -> list[str]:
    """Return the control characters in printed text, with surrounding text."""
    return [repr(text[max(0, m.start() - 20) : m.end() + 20]) for m in CONTROLS.finditer(text)]


def foreign_controls_in(text: str) -> list[str]:
    """Return the control characters in a terminal's output, without those of the panel."""
    return controls_in(RICH.sub("", text))


BROKEN_INDEXES = [
    "[]",
    "null",
    "{}",
    '{"weight_map": []}',
    '{"weight_map": {"a": 5}}',
    '{"weight_map": {"a": "\\u0000"}}',
    '{"weight_map": {"a": "/dev/zero"}}',
    "[" * 100_000,
]
"""Contents of model.safetensors.index.json."""
