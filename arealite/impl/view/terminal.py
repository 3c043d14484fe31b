"""A terminal with the panel at its bottom, and whatever is printed above it.

Apart from the panel, which is drawn into pipes and files as well.
"""

from __future__ import annotations

import os
import sys

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.text import Text

from arealite.base.printable import printable, unguarded
from arealite.impl.view.panel import panel
from arealite.system.health.snapshot import Watch


class Terminal(Console):
    """Prints lines without markup, below the filter of `base.printable`, and draws the panel."""

    def __init__(self) -> None:
        out = unguarded(sys.stdout)
        super().__init__(file=out, highlight=False, soft_wrap=True, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None):
        """Yield segments with control characters of texts replaced; rich's own codes stay."""
        for part in super().render(renderable, options):
            yield part if part.control else part._replace(text=printable(part.text))

    def show_cursor(self, show: bool = True) -> bool:
        """Leave it as it is: who is killed could not bring it back."""
        return False

    @property
    def is_drawable(self) -> bool:
        """Whether the panel can be kept on it: a person's terminal, which nobody else writes to."""
        try:
            os.tcgetpgrp(sys.stdout.fileno())  # a terminal, and this session's own
        except OSError:
            return False
        return self.encoding[:3] == "utf" and not self.is_dumb_terminal and not os.environ.get("CI")

    def keep_panel(self) -> Live:
        """Return what keeps the panel below all that is printed in its body's time."""
        return Live(console=self, auto_refresh=False, redirect_stderr=os.isatty(2))

    def draw(self, live: Live, watch: Watch) -> None:
        """Read the run, and then draw its panel: who prints waits for the drawing only."""
        try:
            # The two columns at the right are for the ^C that a terminal echoes.
            shown = panel(watch.read(), width=self.width - 2, height=self.height - 1)
        except Exception as error:  # noqa: BLE001  (who looks must not end what it looks at)
            shown = Text(f"no panel: {error!r}", no_wrap=True)
        live.update(shown, refresh=True)
