"""A module that makes the warm parent die, hang or refuse at one point of a request.

The warm parent imports it as a stage. The variable POINT names the point, MARK a file: with it, a
later warm parent is sound.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from arealite.ext.warm_start import parent

WARM_PARENT = os.getpid()


def die() -> None:
    """Kill the warm parent."""
    os.kill(WARM_PARENT, signal.SIGKILL)


def hang() -> None:
    """Show that the request has arrived, and stop."""
    Path(os.environ["MARK"]).with_suffix(".hangs").touch()
    select.select([], [], [])


def before(name: str, act: Callable[[], None], *, of: Any = os) -> None:
    """Make a function call `act` first."""
    function = getattr(of, name)
    setattr(of, name, lambda *words: (act(), function(*words))[1])


def after(name: str, act: Callable[[], None]) -> None:
    """Make a function of `os` call `act` when it has returned."""
    function = getattr(os, name)
    setattr(os, name, lambda *words: (function(*words), act())[0])


def in_between() -> None:
    """Kill the warm parent in the process between it and the role."""
    function = os.fork

    def fork() -> int:
        pid = function()
        if not pid and os.getppid() == WARM_PARENT:
            die()
        return pid

    os.fork = fork


POINTS: dict[str, Callable[[], object]] = {
    "at the request": lambda: before("can_fork", die, of=parent),
    "in between": in_between,
    "in the role": lambda: (
        before("waitpid", lambda: select.select([], [], [])),
        before("setsid", die),
    ),
    "after the fork": lambda: after("waitpid", die),
    "after the start": lambda: after("read", die),
    "hangs": lambda: before("can_fork", hang, of=parent),
    "thread": lambda: threading.Thread(target=threading.Event().wait, daemon=True).start(),
    "cuda": lambda: sys.modules.update(
        torch=SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))  # type: ignore[dict-item]
    ),
}

if not os.path.exists(os.environ["MARK"]):
    Path(os.environ["MARK"]).touch()
    POINTS[os.environ["POINT"]]()
