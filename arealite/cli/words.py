"""Flags of a command that stand for dotted options: `--model M` is `model.path=M`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple


class Word(NamedTuple):
    """A flag, and the options that it sets."""

    flags: str
    """Separated by spaces; the last one is the long form."""
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
        the given flags in their long form.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for word in words:
        *_, name = flags = word.flags.split()
        parser.add_argument(*flags, dest=name, metavar=word.value)
    found, rest = parser.parse_known_args(argv)
    given = {name: value for name, value in vars(found).items() if value is not None}
    overrides = [
        option.format(given[word.flags.split()[-1]])
        for word in words
        if word.flags.split()[-1] in given
        for option in word.options.split()
    ]
    return [*overrides, *rest], {*given}


def describe(words: Sequence[Word]) -> str:
    """Return lines for the help of a command, one for each flag."""
    heads = [f"{', '.join(word.flags.split())} {word.value}" for word in words]
    wide = max(map(len, heads))
    return "\n".join(
        f"    {head:<{wide}}  {word.options.replace('{}', word.value)}"
        for head, word in zip(heads, words, strict=True)
    )
