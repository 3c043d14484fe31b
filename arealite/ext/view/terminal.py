"""A terminal that keeps a panel at its bottom, below all printed lines."""

import os
import sys
from collections.abc import Callable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.text import Text

from arealite.base.printable import printable, unguarded

Render = Callable[[int, int], RenderableType]
"""Returns a panel of at most a width and a height, in characters."""


class Terminal(Console):
    """A console on the unfiltered stdout: prints lines without markup, and draws the panel."""

    def __init__(self) -> None:
        super().__init__(
            file=unguarded(sys.stdout),
            highlight=False,
            soft_wrap=True,
            markup=False,
            emoji=False,
        )

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None):
        """Yield segments whose texts have no control characters; rich's own codes stay."""
        for part in super().render(renderable, options):
            if part.control:
                yield part
            else:
                yield part._replace(text=printable(part.text))

    def show_cursor(self, show: bool = True) -> bool:
        """Ignore requests to hide the cursor: a killed process could not restore it."""
        return False

    @property
    def is_drawable(self) -> bool:
        """Whether stdout is an interactive terminal of this session that can show the panel."""
        try:
            os.tcgetpgrp(sys.stdout.fileno())  # raises unless stdout is this session's terminal
        except OSError:
            return False
        if os.environ.get("CI"):
            return False
        return self.encoding.startswith("utf") and not self.is_dumb_terminal

    def keep_panel(self) -> Live:
        """Return a context that keeps the panel below all lines printed in its body."""
        return Live(console=self, auto_refresh=False, redirect_stderr=os.isatty(2))

    def draw(self, live: Live, render: Render) -> None:
        """Render the panel, then draw it; printing blocks only while it is drawn."""
        try:
            # Two columns at the right are left for the ^C that a terminal echoes.
            shown = render(self.width - 2, self.height - 1)
        except Exception as error:  # noqa: BLE001  (the panel must not end the run)
            shown = Text(f"no panel: {error!r}", no_wrap=True)
        live.update(shown, refresh=True)
