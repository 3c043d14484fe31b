"""`arealite COMMAND`: import and call the module of the command, and no other command."""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import cast

from arealite import __version__
from arealite.base.errors import ArealiteError, UserError
from arealite.base.printable import guard_output
from arealite.base.registry import unknown
from arealite.cli.fold import fold

COMMANDS = {
    "quickstart": ("arealite.cli.quickstart", "make and train a tiny model: a first run"),
    "train": ("arealite.cli.train", "train a model (same as train.py)"),
    "presets": ("arealite.cli.presets", "list the configs that --config NAME finds"),
    "serve-llm": ("arealite.cli.serve_llm", "start a language-model server"),
    "serve": ("arealite.cli.serve", "serve an environment to other processes (OpenEnv format)"),
    "envs": ("arealite.cli.envs", "list the environments and their required packages"),
    "play": ("arealite.cli.play", "play an environment in this terminal: play ENV"),
    "check": ("arealite.cli.preflight", "check a run without starting it; estimate its resources"),
    "launch": ("arealite.cli.launch", "check a run and start it on a cluster: launch slurm|ray"),
    "audit": ("arealite.cli.audit", "check that a run lost and repeated no sample"),
    "report": ("arealite.cli.report", "write a run's report: one HTML file"),
    "replay": ("arealite.cli.replay", "train a run again from its ledger, and compare each step"),
    "top": ("arealite.cli.top", "show the state of a run, like the launcher's panel"),
    "why": ("arealite.cli.why", "find the process that blocks a run"),
    "eval": ("arealite.cli.evaluate", "sample held-out tasks: rewards and pass@k by source"),
    "collect": ("arealite.cli.collect", "sample tasks and write trajectories as rows for sft"),
    "export": ("arealite.cli.export", "write a run's checkpoint as a Hugging Face folder"),
    "secret": ("arealite.cli.secret", "print the path of a trial's secret, or replace it"),
    "info": ("arealite.cli.info", "show versions, devices and missing packages"),
    "role": ("arealite.cli.role", "run one process of a run (used by launchers)"),
}


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
    return _call(COMMANDS[args[0]][0], args[1:])


def _piped(call: Callable[..., int], *words: object) -> int:
    """Return the exit code of `call(*words)`; 141 if stdout is a closed pipe, as after `| head`.

    Control characters in the output are replaced, also in tracebacks.
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
        if not any(event & (select.POLLERR | select.POLLHUP) for _, event in out.poll(0)):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else the flush at exit would raise
        return 128 + signal.SIGPIPE


def _call(module: str, argv: Sequence[str]) -> int:
    """Run a command; print an ArealiteError as one line on stderr and return its exit code.

    All but UserError are printed with their traceback. Other exceptions are not caught.
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
    """Return the first ArealiteError in an exception group, or the error itself; else None."""
    if isinstance(error, BaseExceptionGroup):
        inner = cast("BaseExceptionGroup[BaseException]", error).exceptions
        return next((found for each in inner if (found := first(each))), None)
    return error if isinstance(error, ArealiteError) else None


if __name__ == "__main__":
    sys.exit(main())
