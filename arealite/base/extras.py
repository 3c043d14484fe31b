"""Packages that are no dependencies are imported here, when they are used.

One place, so that each is missed in the same words.
"""

from __future__ import annotations

import importlib
from typing import Any

from arealite.base.errors import UserError


def ours(name: str) -> str:
    """Return what `pip install` is given, in the checkout, for an extra of this package."""
    return f"-e '.[{name}]'"


def extra(module: str, fix: str) -> Any:
    """Import what `pip install FIX` installs.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise UserError(f"{module} is not installed: pip install {fix}") from error
