"""A test's hand on the deadlines of a module: it ends a wait that would last until one."""

from __future__ import annotations

import asyncio
from time import monotonic
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from arealite.system.health.waits import Wait, table


class Patience:
    """Ends the waits of a module before their deadlines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        self.ended: list[float | None] = []
        """How long each wait that was ended would have lasted."""
        self._waits: list[tuple[asyncio.AbstractEventLoop, Wait]] = []
        monkeypatch.setattr(module, "Wait", self._make)

    def _make(self, what: str, **limits: Any) -> Wait:
        wait = Wait(what, **limits)
        self._waits.append((asyncio.get_running_loop(), wait))
        return wait

    def end(self, on: str, *, what: str = "") -> None:
        """Let the deadline be now of what began last to wait for `on`; from any thread."""
        loop, wait = [
            (loop, wait)
            for loop, wait in self._waits
            if wait in table and wait.on == on and what in wait.what and wait.seconds is not None
        ][-1]
        loop.call_soon_threadsafe(self._end, wait)

    def _end(self, wait: Wait) -> None:
        if wait in table:
            self.ended.append(wait.seconds)
            wait.expire()


class Clock:
    """Stands for `time.monotonic` in a module."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        self._ahead_s = 0.0
        told = SimpleNamespace(monotonic=lambda: monotonic() + self._ahead_s)
        monkeypatch.setattr(module, "time", told)

    def turn(self, seconds: float) -> None:
        """Let it be that much later."""
        self._ahead_s += seconds
