"""`arealite envs`: list the environments with their seats, tasks and required packages.

A missing package is reported in the environment's line.
"""

import argparse
import inspect
from collections.abc import Iterator, Sequence

from arealite.api.env import Env, envs
from arealite.api.experiment_config import ExperimentConfig
from arealite.base.errors import UserError
from arealite.base.extras import extra_requirement
from arealite.base.printable import fold
from arealite.cli import configs
from arealite.ext.machine.info import package

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
    parser = argparse.ArgumentParser(
        prog="arealite envs",
        description="List the environments: type=NAME in a config.",
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="key=value",
        help="like imports=[my_module]",
    )
    arguments = parser.parse_args(argv)
    configs.load(ExperimentConfig, [], arguments.words)
    table = [HEAD, *rows()]
    *columns, _ = zip(*table, strict=True)  # the last one is not padded
    widths = [max(map(len, column)) for column in columns]
    for *cells, description in table:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        line = "  ".join([*padded, description])
        print(fold(line.rstrip()))
    return 0


def rows() -> Iterator[tuple[str, ...]]:
    """Yield the cells of each environment's row."""
    for name in envs.names():
        needs = _needs(name)
        try:
            env_class = envs.get(name)
        except (ImportError, UserError) as error:
            reason = error.__cause__ or error
            yield name, "?", "?", needs, f"cannot be imported: {reason}"
            continue
        seats = ", ".join(env_class.seats) or "by config"
        tasks = "generated, or a file's" if _generates_tasks(env_class) else "a file's"
        docstring = inspect.getdoc(env_class) or ""
        description, *_ = docstring.split("\n\n")
        yield name, seats, tasks, needs, description.replace("\n", " ")


def _needs(name: str) -> str:
    """Return the optional package of an environment, and how to install it if it is missing."""
    if name not in NEEDS:
        return ""
    needed, requirement = NEEDS[name]
    if package(needed):
        return needed
    return f"{needed}: pip install {requirement}"


def _generates_tasks(env_class: type[Env]) -> bool:
    """Return whether an environment overrides Env.rows, which generates its tasks."""
    rows_function = getattr(env_class.rows, "__func__", None)
    default_function = getattr(Env.rows, "__func__", None)
    return rows_function is not default_function
