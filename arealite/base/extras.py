"""Import optional packages, with one error message for all of them."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from arealite.base.errors import UserError


def extra_requirement(name: str) -> str:
    """Return the argument of `pip install` that installs an extra, from a checkout or by name."""
    is_checkout = (Path(__file__).parents[2] / "pyproject.toml").is_file()
    return f"-e '.[{name}]'" if is_checkout else f"'arealite[{name}]'"


def is_installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    if module in sys.modules:
        return sys.modules[module] is not None  # pyright: ignore[reportUnnecessaryComparison]
    return importlib.util.find_spec(module) is not None


def import_optional(module: str, fix: str) -> ModuleType:
    """Import an optional module.

    Args:
        module: The module.
        fix: The argument of `pip install` that installs it, for the error.

    Raises:
        UserError: The module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise UserError(f"{module} is not installed: pip install {fix}") from error
