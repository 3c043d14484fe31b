"""`arealite envs`: list the environments with their seats, tasks and required packages.

A missing package is reported in the environment's line.
"""

import argparse
import inspect
from collections.abc import Iterator, Sequence

from arealite.api.config import ExperimentConfig
from arealite.api.env import Env, envs
from arealite.base.extras import extra_requirement
from arealite.cli import configs
from arealite.cli.fold import fold
from arealite.cli.info import package

HEAD = ("name", "seats", "tasks", "needs", "description")
NEEDS = {
    "browser": ("playwright", extra_requirement("browser")),
    "webarena": ("playwright", extra_requirement("browser")),
    "reasoning_gym": ("reasoning-gym", extra_requirement("envs")),
    "gymnasium": ("gymnasium", extra_requirement("envs")),
    "textarena": ("textarena", extra_requirement("envs")),
    "gyllm": ("gyllm", "gyllm"),
}
"""The optional package of each environment, and the argument of `pip install` for it."""


def main(argv: Sequence[str]) -> int:
    """Print the table of environments."""
    about = "List the environments: type=NAME in a config."
    parser = argparse.ArgumentParser(prog="arealite envs", description=about)
    parser.add_argument("words", nargs="*", metavar="key=value", help="like imports=[my_module]")
    configs.load(ExperimentConfig, [], parser.parse_args(argv).words)
    lines = [HEAD, *rows()]
    widths = [max(map(len, column)) for column in list(zip(*lines, strict=True))[:-1]]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        print(fold("  ".join([*cells, line[-1]]).rstrip()))
    return 0


def rows() -> Iterator[tuple[str, ...]]:
    """Yield the cells of each environment's row."""
    for name in envs.names():
        needed, fix = NEEDS.get(name, ("", ""))
        needs = f"{needed}: pip install {fix}" if needed and not package(needed) else needed
        try:
            found = envs.get(name)
        except ImportError as error:
            yield name, "?", "?", needs, f"cannot be imported: {error}"
            continue
        seats = ", ".join(found.seats) or "by config"
        is_own = getattr(found.rows, "__func__", None) is not getattr(Env.rows, "__func__", None)
        summary = (inspect.getdoc(found) or "").split("\n\n")[0].replace("\n", " ")
        yield name, seats, "generated, or a file's" if is_own else "a file's", needs, summary
