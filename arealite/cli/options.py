"""The part of the command line that `train` and `serve-llm` share: --config, dotted overrides,
--help with all keys."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from arealite.base import config as base_config


def parse(
    argv: Sequence[str], *, command: str, about: str, schema: type, default: Path
) -> tuple[Path, list[str]]:
    """Return (config file, overrides). `--help` prints every key of `schema` with its default."""
    parser = argparse.ArgumentParser(
        prog=command,
        description=about,
        epilog=_keys(schema),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, default=default, help=f"YAML file ({default.name})")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides")
    options = parser.parse_args(argv)
    return options.config, options.overrides


def _keys(schema: type) -> str:
    lines = [
        f"  {path}={'null' if default is None else default}\n      {text}"
        for path, default, text in base_config.keys(schema)
    ]
    return "keys, with their defaults:\n" + "\n".join(lines)
