"""The signal by which whoever started a process asks it to end: SIGTERM, unless a scheduler sends
that to every process of a run at once, when one of them is to ask the others in its order."""

from __future__ import annotations

import os
import signal
from types import FrameType

OWN_STOP = "AREALITE_OWN_STOP"
"""Environment variable that makes SIGTERM say nothing, and SIGUSR2 what SIGTERM says else."""
STOP = signal.SIGUSR2 if os.environ.get(OWN_STOP) else signal.SIGTERM


def heed_only_stop() -> None:
    """Let SIGTERM do nothing where it is not the signal to stop."""
    if STOP is not signal.SIGTERM:
        signal.signal(signal.SIGTERM, _do_nothing)  # SIG_IGN would be inherited


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass
