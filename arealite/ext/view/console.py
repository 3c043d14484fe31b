"""The launcher's console on a terminal: a panel below all printed lines."""

import threading
from collections.abc import Generator
from contextlib import contextmanager

from rich.live import Live

from arealite.base.printable import guard_output
from arealite.base.trial_files import RunPaths
from arealite.ext.view.panel import renderer
from arealite.ext.view.snapshot import RunReader
from arealite.ext.view.terminal import Terminal

DRAW_S = 1.0
"""Seconds between two drawings of the panel."""
LAST_S = 5.0
"""Time limit of the last drawing of the panel."""


def console_of(run: RunPaths) -> "PanelConsole | None":
    """Return the console of a run; None if stdout cannot show a panel (hook `console`)."""
    terminal = Terminal()
    return PanelConsole(terminal, run) if terminal.is_drawable else None


class PanelConsole:
    """Prints lines, and draws the panel of a run below them."""

    def __init__(self, terminal: Terminal, run: RunPaths) -> None:
        self._terminal = terminal
        self._run = run
        self._is_drawn = False

    @property
    def has_panel(self) -> bool:
        """Whether the panel is drawn."""
        self._end_panel_without_terminal()
        return self._is_drawn

    def _end_panel_without_terminal(self) -> None:
        if self._is_drawn and not self._terminal.is_drawable:
            self._is_drawn = False
            self._terminal.is_interactive = False  # else rich draws it below each printed line

    def print(self, line: str) -> None:
        """Print a line above the panel."""
        self._end_panel_without_terminal()
        self._terminal.print(line)

    @contextmanager
    def shown(self) -> Generator[None]:
        """Draw the panel below all lines printed during the body.

        The last state of the panel remains on the screen.
        """
        self._is_drawn = True
        over = threading.Event()
        with self._terminal.keep_panel() as live:
            guard_output()  # rich replaced the filtered streams by its own
            # A thread, because a disk that does not respond must not block the launcher.
            thread = threading.Thread(target=self._draw, args=(live, over), daemon=True)
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join(LAST_S)

    def _draw(self, live: Live, over: threading.Event) -> None:
        """Draw until `over`, and once more. Waits for: the clock. Unblocks: no process."""
        render = renderer(RunReader(self._run))
        is_last = False
        while not is_last and self.has_panel:
            is_last = over.wait(DRAW_S)
            self._terminal.draw(live, render)
