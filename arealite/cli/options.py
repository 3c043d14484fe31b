"""Command lines: --config, dotted overrides, flags, --help with all keys, and stages of `train`."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from arealite.base import config_tree
from arealite.base.errors import UserError
from arealite.cli import presets
from arealite.cli.line_wrap import fold
from arealite.cli.texts import TEXTS

THEN = TEXTS["stages"]

SHORT = {"model": "model.path", "dataset": "dataset.train"}
"""Keys of words that other programs use as flags."""


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The sources of one config: later files win, and overrides win over files."""

    files: list[Path]
    overrides: list[str]


@dataclass(frozen=True, kw_only=True)
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
        parser = self._parser(is_help=not {"-h", "--help"}.isdisjoint(argv))
        check_flags(argv, self.schema)
        options = parser.parse_intermixed_args(argv)
        files: list[str] = options.config or []
        overrides = list[str]()
        for word in options.words:
            if _names_file(word):
                files.append(word)
            else:
                overrides.append(word)
        paths = [presets.find(file) for file in files]
        return Layers(files=paths or [self.default], overrides=overrides)

    def parse_stages(self, argv: Sequence[str]) -> list[Layers]:
        """Parse arguments with `--then FILE`; return the Layers of each stage."""
        line = replace(self, more=f"{THEN}\n")
        stages = [list[str]()]
        for word in argv:
            if word == "--then" or word.startswith("--then="):
                stages.append(["--config", *word.split("=", 1)[1:]])
            else:
                stages[-1].append(word)
        return [line.parse(stage) for stage in stages]

    def _parser(self, *, is_help: bool) -> argparse.ArgumentParser:
        """Return the parser. Its help lists the keys only if `is_help`, which takes time."""
        parser = argparse.ArgumentParser(
            self.command,
            description=fold(self.description),
            epilog=fold(self.more + _keys(self.schema)) if is_help else "",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parser.add_argument(
            "--config",
            action="append",
            metavar="NAME",
            help=(
                f"YAML file or preset (default: {self.default.stem}); may be repeated, "
                "later ones win"
            ),
        )
        parser.add_argument(
            "words",
            nargs="*",
            metavar="key=value",
            help="dotted overrides; FILE.yaml or PRESET is the same as --config",
        )
        return parser


def _names_file(word: str) -> bool:
    """Return whether a word is a file of a config or a preset, not an override."""
    if "=" in word:
        return False
    return word.endswith((".yaml", ".yml", config_tree.SUFFIX)) or word in presets.names()


def check_flags(argv: Sequence[str], schema: type) -> None:
    """Raise UserError for the first `--key value`, with the override to write instead."""
    for word, after in zip(argv, [*argv[1:], ""], strict=False):
        if not word.startswith("--"):
            continue
        name, _, value = word.removeprefix("--").replace("-", "_").partition("=")
        override_value = value or after or "VALUE"
        keys = _keys_that_end_with(SHORT.get(name, name), schema)
        if keys:
            overrides = [f"{key}={override_value}" for key in keys]
            raise UserError(f"{word} is no option of the command. Write {' or '.join(overrides)}.")


def _keys_that_end_with(name: str, schema: type) -> list[str]:
    """Return at most two keys of a config with this last part, those with the fewest parts."""
    keys = [key for key, *_ in config_tree.keys(schema) if f".{key}".endswith(f".{name}")]
    min_depth = min((key.count(".") for key in keys), default=0)
    shallowest = [key for key in keys if key.count(".") == min_depth]
    return shallowest[:2]


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


def run_parser(command: str, description: str) -> argparse.ArgumentParser:
    """Return the parser of a command whose first argument is a run folder."""
    parser = argparse.ArgumentParser(prog=f"arealite {command}", description=description)
    parser.add_argument("run", type=Path, help="run folder, like runs/EXPERIMENT/TRIAL")
    return parser


def _keys(schema: type) -> str:
    lines = ["keys and their defaults:"]
    for key, default, description in config_tree.keys(schema):
        default_yaml = "null" if default is None else default
        lines.append(f"  {key}={default_yaml}\n      {description}")
    return "\n".join(lines)
