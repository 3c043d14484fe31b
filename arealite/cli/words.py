"""Flags of a command that stand for dotted options: `--model M` is `model.path=M`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple


class Word(NamedTuple):
    """A flag, and the options that it sets."""

    flags: str
    """The flag and, after a space, its long form."""
    value: str
    """Name of its value in the help."""
    options: str
    """Overrides, separated by spaces; `{}` stands for the value."""


def translate(argv: Sequence[str], words: Sequence[Word]) -> tuple[list[str], set[str]]:
    """Replace flags by the overrides they stand for.

    Args:
        argv: The command line.
        words: The flags of the command.

    Returns:
        The new command line, in which overrides of `argv` come after those of flags and win; and
        the given `flags`.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for word in words:
        parser.add_argument(*word.flags.split(), dest=word.flags, metavar=word.value)
    found, rest = parser.parse_known_args(argv)
    given = {flags: value for flags, value in vars(found).items() if value is not None}
    used = [word for word in words if word.flags in given]
    own = [each.format(given[word.flags]) for word in used for each in word.options.split()]
    return [*own, *rest], {*given}


def describe(words: Sequence[Word]) -> str:
    """Return lines for the help of a command, one for each flag."""
    rows = [(f"{each.flags} {each.value}", each.options, each.value) for each in words]
    return "\n".join(f"    {flag:<25} {text.replace('{}', value)}" for flag, text, value in rows)
