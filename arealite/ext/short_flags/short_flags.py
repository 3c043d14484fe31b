"""Flags that stand for dotted options: `--model M` is `model.path=M`."""

import argparse
from collections.abc import Sequence
from typing import NamedTuple


class Word(NamedTuple):
    """A flag that stands for dotted options: `--model M` is `model.path=M`."""

    flags: str
    """The flag and, after a space, its long form."""
    value: str
    """Name of its value in the help."""
    options: str
    """Overrides, separated by spaces; `{}` stands for the value."""


def translate(
    argv: Sequence[str],
    words: Sequence[Word],
) -> tuple[list[str], set[str]]:
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
    namespace, other_words = parser.parse_known_args(argv)
    flag_values = vars(namespace)
    overrides = list[str]()
    used_flags = set[str]()
    for word in words:
        flag_value = flag_values[word.flags]
        if flag_value is not None:
            used_flags.add(word.flags)
            overrides += [option.format(flag_value) for option in word.options.split()]
    return [*overrides, *other_words], used_flags


def describe(words: Sequence[Word]) -> str:
    """Return lines for the help of a command, one for each flag."""
    lines = list[str]()
    for word in words:
        usage = f"{word.flags} {word.value}"
        overrides = word.options.replace("{}", word.value)
        lines.append(f"    {usage:<25} {overrides}")
    return "\n".join(lines)
