"""`arealite top RUN`: show the launcher's panel of a live or finished run, or serve its live page.

The command works on every host that has the folders of the run.
"""

import asyncio
import io
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from arealite.base import log
from arealite.base.trial_files import RunPaths
from arealite.cli.options import run_parser
from arealite.ext.view.panel import panel, renderer
from arealite.ext.view.snapshot import RunReader
from arealite.ext.view.terminal import Terminal
from arealite.impl.launcher.progress import RunProgress


def main(argv: Sequence[str]) -> int:
    """Show a run until its end, or until q or Ctrl-C."""
    parser = run_parser("top", "Show the state of a run until its end; q quits.")
    parser.add_argument("--once", action="store_true", help="print the panel once")
    parser.add_argument(
        "--every",
        type=float,
        default=2.0,
        metavar="S",
        help="seconds between updates (2)",
    )
    parser.add_argument("--web", action="store_true", help="serve the report; it updates itself")
    parser.add_argument(
        "--port",
        type=int,
        metavar="N",
        help="serve the report at this port (any free port)",
    )
    options = parser.parse_args(argv)
    if not 0.1 <= options.every <= 3600.0:
        parser.error(f"--every {options.every:g} must be from 0.1 to 3600 seconds")
    log.setup("top", "error")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    watch = RunReader(RunPaths(options.run))
    terminal = Terminal()
    with suppress(KeyboardInterrupt):
        if options.web or options.port is not None:
            from arealite.ext.view.live import serve  # imports aiohttp

            asyncio.run(serve(watch.paths, options.port or 0, partial(print, flush=True)))
        elif terminal.is_drawable and not options.once:
            draw(watch, terminal, every_s=options.every)
        else:
            print_lines(watch, terminal, every_s=0.0 if options.once else options.every)
    return 0


def draw(watch: RunReader, terminal: Terminal, *, every_s: float) -> None:
    """Update the panel on a terminal; its last state stays."""
    render = renderer(watch)
    with terminal.keep_panel() as live, keyboard() as pressed:
        terminal.draw(live, render)
        while not watch.is_over and pressed(every_s) != "q":
            terminal.draw(live, render)


def print_lines(watch: RunReader, terminal: Terminal, *, every_s: float) -> None:
    """Print a line per step until the end of the run, then the panel as plain text.

    Args:
        watch: The run.
        terminal: The output.
        every_s: Seconds between updates; 0: print the current panel at once.
    """
    shot = watch.read()
    progress = RunProgress(watch.paths.metrics, shot.total_steps, every=1)
    while every_s and not watch.is_over:
        select.select([], [], [], every_s)
        shot = watch.read()
        progress.poll()
    if isinstance(terminal.file, io.TextIOWrapper):
        # The output's encoding may have no block characters.
        terminal.file.reconfigure(errors="replace")  # pyright: ignore[reportUnknownMemberType]
    terminal.print(panel(shot, width=terminal.width))


@contextmanager
def keyboard() -> Generator[Callable[[float], str]]:
    """Yield a function that waits some seconds for a key and returns it; "" without one."""
    keyboards = [sys.stdin.fileno()] if sys.stdin.isatty() else []
    modes = [termios.tcgetattr(descriptor) for descriptor in keyboards]

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select(keyboards, [], [], seconds)
        if not ready:
            return ""
        key = os.read(ready[0], 1) or b"q"  # the terminal is closed
        return key.decode(errors="replace")

    try:
        for descriptor in keyboards:
            tty.setcbreak(descriptor)
        yield pressed
    finally:
        for descriptor, mode in zip(keyboards, modes, strict=True):
            termios.tcsetattr(descriptor, termios.TCSADRAIN, mode)
