"""Wait with a deadline for conditions of other processes that have no event in this process.

A deadline ends a test that hangs, even on a busy machine. It does not assert how fast an operation
is; benchmarks measure that. So the default is one minute.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import pytest


def until(
    condition: Callable[[], object], *, what: str | Callable[[], str], seconds: float = 60.0
) -> None:
    """Return as soon as `condition()` is true; fail the test at the deadline.

    `what` may be a function, for a text that is known only at the end.
    """
    end, is_over = time.monotonic() + seconds, False
    while True:
        begin = time.monotonic()
        if condition():
            return
        if is_over:
            pytest.fail(f"waited {seconds} s for {what() if callable(what) else what}")
        # A condition that reads much must leave the processors to what it waits for.
        time.sleep(max(0.01, 4 * (time.monotonic() - begin)))
        is_over = time.monotonic() >= end  # check once more: this process may have been stopped


async def eventually(
    condition: Callable[[], object], what: str = "what must come", *, seconds: float = 60.0
) -> Any:
    """Return the value of `condition` as soon as it is true, without blocking the event loop."""
    end, is_over = time.monotonic() + seconds, False
    while not (found := condition()):
        if is_over:
            pytest.fail(f"waited {seconds} s for {what}")
        await asyncio.sleep(0.005)
        is_over = time.monotonic() >= end
    return found


def has_exited(process: int | psutil.Process, *, seconds: float = 0.0) -> bool:
    """Return whether a process, given by its id or by psutil, exits within `seconds`.

    A zombie has exited: its id still accepts signals, and psutil still finds it, possibly for as
    long as the test runs. A pidfd is readable for a zombie, and for a process only after all of
    its threads have exited.
    """
    if isinstance(process, psutil.Process):
        if not process.is_running():  # the id may belong to another process now
            return True
        process = process.pid
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


def until_exited(*processes: int | psutil.Process, seconds: float = 60.0) -> None:
    """Return as soon as every process has exited; fail the test at the deadline."""
    end = time.monotonic() + seconds
    for process in processes:
        if not has_exited(process, seconds=max(0.0, end - time.monotonic())):
            pytest.fail(f"waited {seconds} s for the end of {process}")


def stop_ignoring_signals_in_children() -> None:
    """Let SIGINT, SIGQUIT and SIGHUP act on later child processes, although this process ignores
    them, as a background job of a script or under nohup.

    A child process inherits SIG_IGN, but not a handler. The handler does nothing, so this process
    still ignores the signals.
    """
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda _number, _frame: None)


def settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    """Set the result or error of a future, unless it is done."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)


@contextmanager
def spawned(
    command: Sequence[str], environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """Run a command until the body ends, then kill it; its output is in `stdout`."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()
