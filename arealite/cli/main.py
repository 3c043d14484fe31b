"""`arealite COMMAND`: import and call the module of the command, and no other command."""

import importlib
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import cast

from arealite import __version__
from arealite.base import outputs
from arealite.base.data import read_toml
from arealite.base.errors import ArealiteError, UserError
from arealite.base.printable import guard_output
from arealite.base.proxies import bypass_proxies
from arealite.base.registry import unknown
from arealite.cli.fold import fold

COMMANDS: dict[str, tuple[str, str]] = read_toml(__file__, "commands.toml")


def usage() -> str:
    """Return the text of `arealite --help`."""
    lines = [f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items()]
    head = f"arealite {__version__}\nusage: arealite COMMAND [options] [key=value …]\n"
    return "\n".join([head, *lines, "", "arealite COMMAND --help shows the options of a command."])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    return _piped(_main, list(sys.argv[1:] if argv is None else argv))


def run(module: str, argv: Sequence[str]) -> int:
    """Call `main(argv)` of a module like a command; return its exit code."""
    return _piped(_call, module, argv)


def _main(args: Sequence[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(fold(usage()))
        return 0 if args else 2
    if args[0] == "--version":
        print(__version__)
        return 0
    if args[0] not in COMMANDS:
        print(fold(unknown("command", args[0], list(COMMANDS)), sys.stderr), file=sys.stderr)
        return 2
    return _call(f"arealite.cli.{COMMANDS[args[0]][0]}", args[1:])


def _piped(call: Callable[..., int], *words: object) -> int:
    """Return the exit code of `call(*words)`; 141 if stdout is a closed pipe, as after `| head`.

    The exit code of a command that calls `outputs.protect` does not depend on its output. Control
    characters in the output are replaced, also in tracebacks.
    """
    outputs.open_missing()
    guard_output()
    bypass_proxies()  # also for the children
    os.environ.setdefault("PYTHON_COLORS", "0")  # Python 3.13 and later colour tracebacks
    try:
        code = call(*words)
        sys.stdout.flush()
        return code
    except (BrokenPipeError, SystemExit):
        if outputs.is_protected():
            raise
        out = select.poll()
        out.register(1, 0)
        if not any(event & (select.POLLERR | select.POLLHUP) for _, event in out.poll(0)):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else the flush at exit would raise
        return 128 + signal.SIGPIPE


def _call(module: str, argv: Sequence[str]) -> int:
    """Run a command; print an ArealiteError as one line on stderr and return its exit code.

    All but UserError are printed with their traceback. Other exceptions are not caught.
    """
    try:
        if sys.flags.optimize > 1:
            what = "PYTHONOPTIMIZE=2 (python -OO) removes docstrings, but transformers reads them"
            raise UserError(f"{what}. Unset PYTHONOPTIMIZE, or set it to 1.")
        return int(importlib.import_module(module).main(argv))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except (ArealiteError, ExceptionGroup) as raised:
        error = first(raised)
        if error is None:
            raise
        if not isinstance(error, UserError):
            traceback.print_exc()
        print(fold(f"error: {error}", sys.stderr), file=sys.stderr)
        return error.exit_code


def first(error: BaseException) -> ArealiteError | None:
    """Return the first ArealiteError in an exception group, or the error itself; else None."""
    if isinstance(error, BaseExceptionGroup):
        inner = cast("BaseExceptionGroup[BaseException]", error).exceptions
        return next((found for each in inner if (found := first(each))), None)
    return error if isinstance(error, ArealiteError) else None


if __name__ == "__main__":
    sys.exit(main())
