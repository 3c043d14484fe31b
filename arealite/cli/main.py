"""`arealite COMMAND`: import and call the command's function, and no other command."""

import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence

from arealite import __version__
from arealite.base import entries, exit_record, outputs
from arealite.base.errors import ArealiteError, UserError, first_of
from arealite.base.files import read_toml
from arealite.base.printable import fold, guard_output
from arealite.base.proxies import bypass_proxies
from arealite.base.registry import unknown

GROUP = "command"
"""Group of entries: functions of the words after the command. They return an exit code, or None."""
COMMANDS: dict[str, str] = read_toml(__file__, "help.toml")
"""The line of help of each of AReaLite's commands."""


def usage() -> str:
    """Return the text of `arealite --help`."""
    lines = [f"  {name:<12} {summary}" for name, summary in COMMANDS.items()]
    foot = "\narealite COMMAND --help shows the options of a command."
    for name, target in entries.installed(GROUP).items():
        package = target.partition(".")[0].partition(":")[0]
        if name in entries.own(GROUP):
            foot += f"\nThe command {name} of the installed package {package} never runs: "
            foot += "AReaLite has a command of this name."
        else:
            lines.append(f"  {name:<12} of the installed package {package}")
    head = f"arealite {__version__}\nusage: arealite COMMAND [options] [key=value …]\n"
    return "\n".join([head, *lines, foot])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    return _piped(_main, list(sys.argv[1:] if argv is None else argv))


def run(module: str, argv: Sequence[str]) -> int:
    """Call `main(argv)` of a module like a command; return its exit code."""
    return _piped(_call, f"{module}:main", argv)


def _main(args: Sequence[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(fold(usage()))
        return 0 if args else 2
    if args[0] == "--version":
        print(__version__)
        return 0
    command = args[0]
    target = entries.find(GROUP, command)
    if target is None:
        names = [*COMMANDS, *entries.installed(GROUP)]
        message = unknown("command", command, names)
        print(fold(message, sys.stderr), file=sys.stderr)
        return 2
    return _call(target, args[1:])


def _piped(call: Callable[..., int], *words: object) -> int:
    """Return the exit code of `call(*words)`; 141 if stdout is a closed pipe, as after `| head`.

    The exit code of a command that calls `outputs.protect` does not depend on its output. Control
    characters in the output are replaced, also in tracebacks.
    """
    exit_record.claim()
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
        if not _is_stdout_closed():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else the flush at exit would raise
        return 128 + signal.SIGPIPE
    except Exception as error:
        exit_record.write(error)
        raise


def _is_stdout_closed() -> bool:
    """Return whether the reader of a pipe or socket at stdout has closed it."""
    stdout = select.poll()
    stdout.register(1, 0)
    closed = select.POLLERR | select.POLLHUP
    return any(event & closed for _, event in stdout.poll(0))


def _call(target: str, argv: Sequence[str]) -> int:
    """Run a command; print an ArealiteError as one line on stderr and return its exit code.

    All but UserError are printed with their traceback. Other exceptions are not caught.
    """
    try:
        if sys.flags.optimize > 1:
            raise UserError(
                "PYTHONOPTIMIZE=2 (python -OO) removes docstrings, but transformers reads them. "
                "Unset PYTHONOPTIMIZE, or set it to 1."
            )
        return int(entries.load(target)(argv) or 0)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except (ArealiteError, ExceptionGroup) as raised:
        error = first_of(raised, ArealiteError)
        if error is None:
            raise
        if not isinstance(error, UserError):
            traceback.print_exc()
        exit_record.write(error)
        print(fold(f"error: {error}", sys.stderr), file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
