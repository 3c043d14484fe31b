"""`arealite presets`: list the configs that --config finds by name."""

import argparse
from collections.abc import Sequence

from arealite.base.printable import fold
from arealite.cli.options import find_config, preset_names


def main(argv: Sequence[str]) -> int:
    """Print a line for each preset, or the content of one preset."""
    parser = argparse.ArgumentParser(
        prog="arealite presets",
        description="List the configs that --config NAME finds.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this preset's YAML")
    selected = parser.parse_args(argv).name
    if selected:
        print(find_config(selected).read_text(), end="")
        return 0
    for name in preset_names():
        first_line, _, _ = find_config(name).read_text().partition("\n")
        summary = first_line.removeprefix("# ")
        print(fold(f"{name:<18} {summary}"))
    return 0
