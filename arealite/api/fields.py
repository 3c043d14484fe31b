"""Config fields that carry their own documentation.

The text of `help` is what `--help` and the reference print; a field without it does not pass the
tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any


def opt(default: Any, help: str) -> Any:
    """Declare a config field with a default and one line of documentation."""
    return field(default=default, metadata={"help": help})


def sub(factory: Callable[[], Any], help: str) -> Any:
    """Declare a nested config (or list) made by `factory`, with one line of documentation."""
    return field(default_factory=factory, metadata={"help": help})
