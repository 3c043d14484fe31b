"""The reason of a failed process, as a record for the process that started it.

A parent names a file in an environment variable. A command of AReaLite that fails writes its record
there; a process that is killed, or is another program, writes none.
"""

import os
import traceback
from contextlib import suppress
from pathlib import Path
from typing import cast

import msgspec

from arealite.base.errors import ArealiteError, first_of
from arealite.base.files import replacing

VARIABLE = "AREALITE_EXIT_RECORD"
"""Environment variable with the path of the record."""
ERROR = "error: "
"""Prefix of the line in which a command reports a deliberately raised error."""
MAX_REASON = 500
"""Longest reason, in characters."""
REPEATABLE = """
ArithmeticError AssertionError AttributeError ImportError IndexError KeyError ModuleNotFoundError
NameError NotImplementedError RuntimeError TypeError UnboundLocalError ValueError ZeroDivisionError
"""
"""Exceptions that follow from code and data. Those of memory, network and disk are others."""
COLLECTIVES = os.path.join("torch", "distributed", "")
"""Part of the file name of torch's code for collectives, whose exceptions other ranks may cause."""


class ExitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Why a process ended. Filled by the process itself."""

    reason: str
    """One line: the message of a deliberately raised error; else the type and the first line of the
    message of the exception, in an exception group that of the last leaf."""
    is_deliberate: bool
    """Whether it is an ArealiteError: a wrong input, a broken invariant, a lost role."""
    origin: str = ""
    """The innermost line of the exception's traceback; "" for a deliberate error."""

    @property
    def is_repeatable(self) -> bool:
        """Whether the same exception at the same line will follow if nothing changes."""
        name, _, message = self.reason.partition(":")
        is_outside = "CUDA" in message or COLLECTIVES in self.origin
        return name in REPEATABLE.split() and not (self.is_deliberate or is_outside)


_files: list[Path] = []
"""The file of this process's record; [] without a parent that reads it."""


def path_of(log: Path) -> Path:
    """Return the file of the record of a process, beside its log."""
    return log.with_suffix(".exit.json")


def new_file(log: Path | None) -> Path | None:
    """Return the file of the record of a process that starts now, without an earlier record."""
    if log is None:
        return None
    file = path_of(log)
    file.unlink(missing_ok=True)
    return file


def claim() -> None:
    """Remove the record's path from the environment, so that children do not inherit it."""
    path = os.environ.pop(VARIABLE, "")
    _files[:] = [Path(path)] if path else []


def write(error: BaseException) -> None:
    """Write the record of this process's end, if its parent reads it."""
    for file in _files:
        with suppress(OSError), replacing(file) as temporary:  # a full disk must hide no error
            temporary.write_bytes(msgspec.json.encode(record_of(error)))


def read(file: Path) -> ExitRecord | None:
    """Return the record of an ended process; None if it wrote none."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=ExitRecord)
    except (OSError, msgspec.MsgspecError):
        return None


def record_of(error: BaseException) -> ExitRecord:
    """Return the record of a process that ends with `error`."""
    deliberate = first_of(error, ArealiteError)
    if deliberate is not None:
        return ExitRecord(reason=_cut(str(deliberate)), is_deliberate=True)
    leaf = _last_leaf(error)
    message = leaf.msg if isinstance(leaf, SyntaxError) else str(leaf)
    first_line = next(iter(message.strip().splitlines()), "")
    error_class = type(leaf)
    name = error_class.__qualname__
    if error_class.__module__ not in ("builtins", "__main__"):
        name = f"{error_class.__module__}.{name}"
    reason = f"{name}: {first_line}" if first_line else name
    innermost = traceback.format_tb(leaf.__traceback__, -1)
    return ExitRecord(reason=_cut(reason), is_deliberate=False, origin="".join(innermost))


def _last_leaf(error: BaseException) -> BaseException:
    """Return the last exception in an exception group, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        *_, error = group.exceptions
    return error


def _cut(reason: str) -> str:
    return " ".join(reason.split())[:MAX_REASON]
