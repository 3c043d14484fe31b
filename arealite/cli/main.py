"""`arealite <command>`: finds the command's module and hands over; nothing heavy is imported
before that."""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, cast

from arealite import __version__
from arealite.base.errors import ArealiteError, UserError
from arealite.base.printable import guard_output
from arealite.base.registry import unknown
from arealite.cli.fold import fold

COMMANDS = {
    "train": ("arealite.cli.train", "train: the same as train.py"),
    "serve-llm": ("arealite.cli.serve_llm", "start a language-model server"),
    "serve": ("arealite.cli.serve", "host an environment for other processes: OpenEnv's format"),
    "envs": ("arealite.cli.envs", "list the environments, and what each needs"),
    "play": ("arealite.cli.play", "play an environment in this terminal: play ENV"),
    "check": ("arealite.cli.preflight", "check a run without starting it; what it will need"),
    "launch": ("arealite.cli.launch", "check a run and start it on a cluster: launch slurm|ray"),
    "audit": ("arealite.cli.audit", "print the balance of a run's ledger"),
    "report": ("arealite.cli.report", "write a run's report: one HTML file to look at"),
    "replay": ("arealite.cli.replay", "train a run again from its ledger, and compare each step"),
    "top": ("arealite.cli.top", "show what a run is doing: the launcher's panel, from anywhere"),
    "why": ("arealite.cli.why", "name who holds a run up, who waits for whom, and where"),
    "eval": ("arealite.cli.evaluate", "sample held-out tasks: rewards and pass@k by source"),
    "collect": ("arealite.cli.collect", "sample tasks and write trajectories as rows for sft"),
    "export": ("arealite.cli.export", "write a run's checkpoint as a Hugging Face folder"),
    "secret": ("arealite.cli.secret", "print where a trial's secret is, or replace it"),
    "info": ("arealite.cli.info", "show versions, devices and what is missing"),
    "role": ("arealite.cli.role", "run one process of a run (what launchers start)"),
}


def usage() -> str:
    """Return the text of `arealite --help`."""
    lines = [f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items()]
    head = f"arealite {__version__}\nusage: arealite COMMAND [options] [key=value …]\n"
    return "\n".join([head, *lines, "", "arealite COMMAND --help says more."])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    return _piped(_main, list(sys.argv[1:] if argv is None else argv))


def run(module: str, argv: Sequence[str]) -> int:
    """Call the module's `main(argv)` and return its exit code, as `main` does for its command."""
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
    return _call(COMMANDS[args[0]][0], args[1:])


def _piped(call: Callable[..., int], *words: Any) -> int:
    """Return the exit code of `call(*words)`; 141 where nobody reads on, as after `| head`.

    Control characters in the output are replaced, also in a last traceback.
    """
    guard_output()
    os.environ.setdefault("PYTHON_COLORS", "0")  # Python 3.13 and later colour tracebacks
    try:
        code = call(*words)
        sys.stdout.flush()
        return code
    except (BrokenPipeError, SystemExit):
        out = select.poll()
        out.register(1, 0)
        if not any(event & select.POLLERR for _, event in out.poll(0)):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter's end would raise
        return 128 + signal.SIGPIPE


def _call(module: str, argv: Sequence[str]) -> int:
    """End what was raised on purpose as one line on stderr.

    A UserError is that line and exit code 2; others come with their traceback, and exit code 1.
    """
    try:
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
    """Return the first error raised on purpose in a group of a TaskGroup, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        inner = cast("BaseExceptionGroup[BaseException]", error).exceptions
        return next((found for each in inner if (found := first(each))), None)
    return error if isinstance(error, ArealiteError) else None


if __name__ == "__main__":
    sys.exit(main())
