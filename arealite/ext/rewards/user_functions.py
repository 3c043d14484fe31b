"""Imports the functions of users that options name."""

from inspect import isfunction
from typing import Any

from arealite.base.errors import UserError
from arealite.base.registry import import_user_module, unknown


def import_function(path: str, option: str) -> Any:
    """Import the function or class `module:name` or `file.py:name` that an option names.

    Raises:
        UserError: As `import_user_module`, or the module has no callable of that name.
    """
    module, _, name = path.rpartition(":")
    if not module:
        raise UserError(f"{option} names no function. Write module:name or file.py:name.")
    imported_module = import_user_module(module, option)
    target = getattr(imported_module, name, None)
    if not callable(target):
        functions = [name for name, value in vars(imported_module).items() if isfunction(value)]
        raise UserError(f"{option}: {unknown('function', name, functions)}")
    return target
