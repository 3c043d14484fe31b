"""Waiting with a deadline for what another process does and no event of this one can tell, and the
other side of a wait.

A test's deadline is a safety net: it ends a test that hangs, on a machine however busy, and never
says how fast something must be. So it is a minute, and what is fast is measured by a benchmark.
"""

from __future__ import annotations

import asyncio
import os
import select
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
    """Return as soon as `condition()` is true; fail the test when it does not come true in time.

    `what` may be a function, for words that are known only at the end.
    """
    end, is_over = time.monotonic() + seconds, False
    while not condition():
        if is_over:
            pytest.fail(f"waited {seconds} s for {what() if callable(what) else what}")
        time.sleep(0.01)
        is_over = time.monotonic() >= end  # it has one more look: we may have been held


async def eventually(
    condition: Callable[[], object], what: str = "what must come", *, seconds: float = 60.0
) -> Any:
    """Return what `condition` gives as soon as it is true; the loop runs on meanwhile."""
    end, is_over = time.monotonic() + seconds, False
    while not (found := condition()):
        if is_over:
            pytest.fail(f"waited {seconds} s for {what}")
        await asyncio.sleep(0.005)
        is_over = time.monotonic() >= end
    return found


def has_exited(process: int | psutil.Process, *, seconds: float = 0.0) -> bool:
    """Return whether a process, given by its id or by psutil, exits within `seconds`.

    A process that nobody has reaped yet has exited: its id still takes signals, psutil still finds
    it, and where process 1 reaps nothing that stays so. The kernel's event for an exit is true of
    it, and of a process only when all of its threads have ended.
    """
    if isinstance(process, psutil.Process):
        if not process.is_running():  # its id may be another's by now
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
    """Return as soon as every process has exited; fail the test when one does not in time."""
    end = time.monotonic() + seconds
    for process in processes:
        if not has_exited(process, seconds=max(0.0, end - time.monotonic())):
            pytest.fail(f"waited {seconds} s for the end of {process}")


def settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    """Give a future what its job returned or raised, unless nobody waits any more."""
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
    """Run a command for the body's time, its words in `stdout`; it is killed at the end."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()
