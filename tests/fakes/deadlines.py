"""Lets a test end a wait of a module before its deadline."""

from __future__ import annotations

import asyncio
from time import monotonic
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from arealite.system.health.waits import Wait, table


class WaitExpirer:
    """Ends the waits of a module before their deadlines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        self.expired: list[float | None] = []
        """Full duration, in seconds, of each wait that was ended early."""
        self._waits: list[tuple[asyncio.AbstractEventLoop, Wait]] = []
        monkeypatch.setattr(module, "Wait", self._make)

    def _make(self, event: str, **limits: Any) -> Wait:
        wait = Wait(event=event, **limits)
        self._waits.append((asyncio.get_running_loop(), wait))
        return wait

    def expire(self, on: str, *, what: str = "") -> None:
        """End the newest wait for `on` as if its deadline had passed; from any thread."""
        loop, wait = [
            (loop, wait)
            for loop, wait in self._waits
            if wait in table and wait.on == on and what in wait.event and wait.seconds is not None
        ][-1]
        loop.call_soon_threadsafe(self._expire, wait)

    def _expire(self, wait: Wait) -> None:
        if wait in table:
            self.expired.append(wait.seconds)
            wait.expire()


class Clock:
    """Replaces `time.monotonic` in a module."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        self._ahead_s = 0.0
        told = SimpleNamespace(monotonic=lambda: monotonic() + self._ahead_s)
        monkeypatch.setattr(module, "time", told)

    def advance(self, seconds: float) -> None:
        """Advance the clock."""
        self._ahead_s += seconds
