"""Config fields that carry their own documentation and range.

The text of `help` is what `--help` and the reference print; a field without it does not pass the
tests. The range is checked wherever a config is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from typing import Any

Constraints = Iterator[tuple[bool, str]]
"""Yielded by a config's method `constraints`: whether each holds, and the error where it does not.
The error begins with an option's name; base.config.check_constraints puts the section before it."""


def opt(
    default: Any,
    help: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    renamed: Mapping[str, str] | None = None,
) -> Any:
    """Declare a config field with a default, one line of documentation, and a number's range.

    A number with a range must also be finite; `above=-inf` asks for nothing else. None is left to
    the field's type. `renamed` maps former values of a choice to their new names.
    """
    bounds = {"at least": at_least, "above": above, "at most": at_most, "below": below}
    given = {word: at for word, at in bounds.items() if at is not None}
    metadata = {"help": help, "bounds": given, "renamed": renamed or {}}
    return field(default=default, metadata=metadata)


def sub(factory: Callable[[], Any], help: str) -> Any:
    """Declare a nested config (or list) made by `factory`, with one line of documentation."""
    return field(default_factory=factory, metadata={"help": help})
