"""The signals that stop a process of a run.

* SIGTERM; under a scheduler SIGUSR2. A scheduler sends SIGTERM to all processes of a run at once.
  The supervisor then stops the other processes in order, with SIGUSR2, and they ignore SIGTERM.
* SIGINT, also in a background job of a script: shells start such a job with SIGINT ignored, and
  `kill -INT` is the Ctrl-C of that job.
* SIGHUP, which a terminal sends when it closes. It stays ignored if it was ignored at the start, as
  by nohup.
"""

import asyncio
import atexit
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

PR_SET_PDEATHSIG = 1
OWN_STOP = "AREALITE_OWN_STOP"
"""Environment variable that replaces SIGTERM by SIGUSR2 as the stop signal."""
STOP = signal.SIGUSR2 if os.environ.get(OWN_STOP) else signal.SIGTERM


def stop_signals() -> list[signal.Signals]:
    """Return the signals that request this process to stop."""
    is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    if is_nohup:
        return [STOP, signal.SIGINT]
    return [STOP, signal.SIGINT, signal.SIGHUP]


def is_repeated_hangup(number: int, num_requests: int) -> bool:
    """Return whether a signal is a SIGHUP after another stop request.

    Shell and kernel each send SIGHUP when a terminal closes. The second one must not stop a process
    at once, as a second Ctrl-C does.
    """
    return number == signal.SIGHUP and num_requests > 0


def on_stop(loop: asyncio.AbstractEventLoop, handler: Callable[[int], object]) -> None:
    """Call `handler` with the number of each stop signal, without repeated hang-ups."""
    num_requests = 0

    def request(number: int) -> None:
        nonlocal num_requests
        if not is_repeated_hangup(number, num_requests):
            num_requests += 1
            handler(number)

    for number in stop_signals():
        loop.add_signal_handler(number, request, number)


def ignore(number: int) -> None:
    """Ignore a signal until the end of this process, but not in its child processes.

    A child process would inherit SIG_IGN. At its end the interpreter resets all handlers except
    SIG_IGN, so SIG_IGN replaces the handler at exit.
    """
    with suppress(ValueError):  # only the main thread may set a handler
        signal.signal(number, lambda _number, _frame: None)
    atexit.register(signal.signal, number, signal.SIG_IGN)


def ignore_other_stops() -> None:
    """Ignore SIGTERM if it is not the stop signal."""
    if STOP is not signal.SIGTERM:
        ignore(signal.SIGTERM)


def kill_with_parent(parent_pid: int) -> bool:
    """Make the kernel kill this process when its parent exits (Linux only).

    Returns:
        Whether the parent still runs: a parent that exited before the call kills nothing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent_pid
