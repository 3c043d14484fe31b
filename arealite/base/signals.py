"""The signal that stops a process of a run: SIGTERM, or SIGUSR2 under a scheduler.

A scheduler sends SIGTERM to all processes of a run at once. The supervisor then stops the other
processes in order, with SIGUSR2, and they ignore SIGTERM.
"""

import os
import signal

OWN_STOP = "AREALITE_OWN_STOP"
"""Environment variable that replaces SIGTERM by SIGUSR2 as the stop signal."""
STOP = signal.SIGUSR2 if os.environ.get(OWN_STOP) else signal.SIGTERM


def ignore_other_stops() -> None:
    """Ignore SIGTERM if it is not the stop signal."""
    if STOP is not signal.SIGTERM:
        signal.signal(signal.SIGTERM, lambda _number, _frame: None)  # SIG_IGN would be inherited
