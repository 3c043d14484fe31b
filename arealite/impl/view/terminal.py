"""A terminal with the panel at its bottom, and whatever is printed above it.

Apart from the panel, which is drawn into pipes and files as well.
"""

from __future__ import annotations

import os
import sys

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from arealite.impl.view.panel import panel
from arealite.system.health.snapshot import Watch


class Terminal(Console):
    """Where lines go as they are."""

    def __init__(self) -> None:
        super().__init__(highlight=False, soft_wrap=True, markup=False, emoji=False)

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
        is_utf8 = self.encoding.startswith("utf")
        return is_utf8 and not self.is_dumb_terminal and not os.environ.get("CI")

    def keep_panel(self) -> Live:
        """Return what keeps the panel below all that is printed in its body's time."""
        return Live(console=self, auto_refresh=False, redirect_stderr=sys.stderr.isatty())

    def draw(self, live: Live, watch: Watch) -> None:
        """Read the run, and then draw its panel: who prints waits for the drawing only."""
        live.update(self._read(watch), refresh=True)

    def _read(self, watch: Watch) -> RenderableType:
        size = self.size
        try:
            # The two columns at the right are for the ^C that a terminal echoes.
            return panel(watch.read(), width=size.width - 2, height=size.height - 1)
        except Exception as error:  # noqa: BLE001  (who looks must not end what it looks at)
            return Text(f"no panel: {error!r}", no_wrap=True)
