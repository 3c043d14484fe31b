"""Waiting with a deadline for what another process does and no event of this one can tell."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], *, what: str, seconds: float = 20.0) -> None:
    """Return as soon as `condition()` is true; fail the test when it does not come true in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.01)
