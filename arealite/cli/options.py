"""Command lines: --config, dotted overrides, flags, --help with all keys, and stages of `train`."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from arealite.base import config as base_config
from arealite.base.errors import UserError
from arealite.cli import presets
from arealite.cli.fold import fold
from arealite.cli.texts import TEXTS

THEN = TEXTS["stages"]

SHORT = {"model": "model.path", "dataset": "dataset.train"}
"""Keys of words that other programs use as flags."""


@dataclass(frozen=True)
class Layers:
    """The sources of one config: later files win, and overrides win over files."""

    files: list[Path]
    overrides: list[str]


@dataclass(frozen=True)
class CommandLine:
    """The arguments of a command that reads a config."""

    command: str
    description: str
    schema: type
    default: Path
    """Config file if the command line names none."""
    more: str = ""
    """Text of `--help` before the keys."""

    def parse(self, argv: Sequence[str]) -> Layers:
        """Parse the arguments. `--help` prints every key of `schema` with its default."""
        is_help = not {"-h", "--help"}.isdisjoint(argv)
        about = fold(self.description)
        keys = fold(self.more + _keys(self.schema)) if is_help else ""
        form = argparse.RawDescriptionHelpFormatter
        parser = argparse.ArgumentParser(
            self.command, description=about, epilog=keys, formatter_class=form, allow_abbrev=False
        )
        text = f"YAML file or preset (default: {self.default.stem}); may be repeated, "
        text += "later ones win"
        parser.add_argument("--config", action="append", metavar="NAME", help=text)
        text = "dotted overrides; FILE.yaml or PRESET is the same as --config"
        parser.add_argument("words", nargs="*", metavar="key=value", help=text)
        check_flags(argv, self.schema)
        options = parser.parse_intermixed_args(argv)
        names = [word for word in options.words if "=" not in word]
        files = [n for n in names if n.endswith((".yaml", ".yml")) or n in presets.names()]
        overrides = [word for word in options.words if word not in files]
        found = [*map(presets.find, [*(options.config or []), *files])]
        return Layers(found or [self.default], overrides)

    def parse_stages(self, argv: Sequence[str]) -> list[Layers]:
        """Parse arguments with `--then FILE`; return the Layers of each stage."""
        glued = [word.split("=", 1) if word.startswith("--then=") else [word] for word in argv]
        words = [word for pieces in glued for word in pieces]
        cuts = [i for i, word in enumerate(words) if word == "--then"]
        parts = [words[a:b] for a, b in pairwise([0, *cuts, len(words)])]
        lines = [parts[0], *(["--config", *part[1:]] for part in parts[1:])]
        return [replace(self, more=f"{THEN}\n").parse(line) for line in lines]


def check_flags(argv: Sequence[str], schema: type) -> None:
    """Raise UserError for the first `--key value`, with the override to write instead."""
    for word, after in zip(argv, [*argv[1:], ""], strict=False):
        if not word.startswith("--"):
            continue
        name, _, value = word.removeprefix("--").replace("-", "_").partition("=")
        keys = [key for key, *_ in base_config.keys(schema)]
        found = [key for key in keys if f".{key}".endswith(f".{SHORT.get(name, name)}")]
        depth = min((key.count(".") for key in found), default=0)
        if near := [key for key in found if key.count(".") == depth][:2]:
            written = [f"{key}={value or after or 'VALUE'}" for key in near]
            raise UserError(f"{word} is no option of the command. Write {' or '.join(written)}.")


class Word(NamedTuple):
    """A flag that stands for dotted options: `--model M` is `model.path=M`."""

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


def run_parser(command: str, description: str) -> argparse.ArgumentParser:
    """Return the parser of a command whose first argument is a run folder."""
    parser = argparse.ArgumentParser(prog=f"arealite {command}", description=description)
    parser.add_argument("run", type=Path, help="run folder, like runs/EXPERIMENT/TRIAL")
    return parser


def _keys(schema: type) -> str:
    lines = [
        f"  {path}={'null' if default is None else default}\n      {text}"
        for path, default, text in base_config.keys(schema)
    ]
    return "keys and their defaults:\n" + "\n".join(lines)
