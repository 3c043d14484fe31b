"""Command lines: --config with a file or a preset, dotted overrides, flags, --help with all keys.

`--config demo` reads the preset config/demo.yaml of the package.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from arealite.base import config_tree
from arealite.base.errors import UserError
from arealite.base.printable import fold
from arealite.base.registry import unknown

SHORT = {"model": "model.path", "dataset": "dataset.train"}
"""Keys of words that other programs use as flags."""

CONFIG_DIR = Path(__file__).resolve().parents[1] / "config"
"""Folder of the YAML files; a link in a checkout, a folder in an installed wheel."""


def preset_names() -> list[str]:
    """Return the names of all presets: first those that are complete, then parts of a config."""
    files = [file.relative_to(CONFIG_DIR) for file in CONFIG_DIR.rglob("*.yaml")]
    files.sort(key=lambda file: (len(file.parts), file))
    return [str(file.with_suffix("")) for file in files]


def find_config(name: str) -> Path:
    """Return the file of a config: `name` if it is a file, else the preset of this name.

    A preset's last part is enough, and the path in a checkout works, too: gspo and
    config/algo/gspo.yaml are algo/gspo.

    Raises:
        UserError: There is no such file and no such preset.
    """
    file = Path(name).expanduser()
    short = name.removeprefix("config/").removesuffix(".yaml")
    matches = [preset for preset in preset_names() if f"/{preset}".endswith(f"/{short}")]
    if matches and not file.is_file():
        return CONFIG_DIR / f"{matches[0]}.yaml"
    if file.exists() or file.suffix in (".yaml", ".yml"):  # reading it reports a missing file
        return file
    raise UserError(
        f"{unknown('preset', name, preset_names())} `arealite presets` describes them. "
        "A file of your own ends with .yaml."
    )


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
        paths = [find_config(file) for file in files]
        return Layers(files=paths or [self.default], overrides=overrides)

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
    return word.endswith((".yaml", ".yml", config_tree.SUFFIX)) or word in preset_names()


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
