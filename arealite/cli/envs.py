"""`arealite envs`: the environments there are, who acts in them, and what each needs.

A package that is missing is a word in its environment's line, and never breaks the list.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator, Sequence

from arealite.api.config import ExperimentConfig
from arealite.api.env import Env, envs
from arealite.base.extras import ours
from arealite.cli import configs
from arealite.cli.fold import fold
from arealite.cli.info import package

HEAD = ("name", "seats", "tasks", "needs", "what it is")
NEEDS = {
    "browser": ("playwright", ours("browser")),
    "webarena": ("playwright", ours("browser")),
    "reasoning_gym": ("reasoning-gym", ours("envs")),
    "gymnasium": ("gymnasium", ours("envs")),
    "textarena": ("textarena", ours("envs")),
    "gyllm": ("gyllm", "gyllm"),
}
"""Packages that are no dependencies, and what pip installs them with."""


def main(argv: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="arealite envs", description="List the environments: type=NAME in a config."
    )
    parser.add_argument("words", nargs="*", metavar="key=value", help="as imports=[my_module]")
    configs.load(ExperimentConfig, [], parser.parse_args(argv).words)
    lines = [HEAD, *rows()]
    widths = [max(map(len, column)) for column in list(zip(*lines, strict=True))[:-1]]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        print(fold("  ".join([*cells, line[-1]]).rstrip()))
    return 0


def rows() -> Iterator[tuple[str, ...]]:
    """Yield the cells of each environment's line."""
    for name in envs.names():
        needed, fix = NEEDS.get(name, ("", ""))
        is_missing = needed and not package(needed)
        needs = f"{needed}: pip install {fix}" if is_missing else needed
        try:
            found = envs.get(name)
        except ImportError as error:
            yield name, "?", "?", needs, f"cannot be imported: {error}"
            continue
        told = ", ".join(found.seats) or "by config"
        is_own = getattr(found.rows, "__func__", None) is not getattr(Env.rows, "__func__", None)
        summary = (inspect.getdoc(found) or "").split("\n\n")[0].replace("\n", " ")
        yield name, told, "generated, or a file's" if is_own else "a file's", needs, summary
