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


def check_installed(module: str, requirement: str, option: str) -> None:
    """Check that a module is installed, without importing it.

    Args:
        module: The module.
        requirement: The argument of `pip install` that installs it.
        option: The option that needs it, with its value.

    Raises:
        UserError: The module is not installed.
    """
    is_imported = bool(sys.modules.get(module))
    if not is_imported and importlib.util.find_spec(module) is None:
        raise UserError(
            f"{option} needs the package {module}, which is not installed: "
            f"pip install {requirement}"
        )


def import_optional(module: str, requirement: str) -> ModuleType:
    """Import an optional module.

    Args:
        module: The module.
        requirement: The argument of `pip install` that installs it, for the error.

    Raises:
        UserError: The module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise UserError(f"{module} is not installed: pip install {requirement}") from error
