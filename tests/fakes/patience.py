"""A test's hand on the deadlines of a module: it ends a wait that would last until one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from arealite.system.health.waits import deadline


@dataclass(eq=False)
class Wait:
    """One that goes on."""

    on: str
    seconds: float | None
    timer: asyncio.Timeout
    loop: asyncio.AbstractEventLoop


class Patience:
    """Stands for `deadline` in a module."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        self.ended: list[float | None] = []
        """How long each wait that was ended would have lasted."""
        self._waits: list[Wait] = []
        monkeypatch.setattr(module, "deadline", self._deadline)

    @asynccontextmanager
    async def _deadline(
        self, what: str, *, on: str, seconds: float | None, **limits: Any
    ) -> AsyncIterator[asyncio.Timeout]:
        async with deadline(what, on=on, seconds=seconds, **limits) as timer:
            wait = Wait(on, seconds, timer, asyncio.get_running_loop())
            self._waits.append(wait)
            try:
                yield timer
            finally:
                self._waits.remove(wait)

    def end(self, on: str) -> None:
        """Let the deadline be now of what began last to wait for `on`; from any thread."""
        wait = [each for each in self._waits if each.on == on][-1]
        wait.loop.call_soon_threadsafe(self._end, wait)

    def _end(self, wait: Wait) -> None:
        if wait in self._waits:
            self.ended.append(wait.seconds)
            wait.timer.reschedule(wait.loop.time())


class Clock:
    """Stands for `time.monotonic` in a module."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        self._ahead_s = 0.0
        told = SimpleNamespace(monotonic=lambda: monotonic() + self._ahead_s)
        monkeypatch.setattr(module, "time", told)

    def turn(self, seconds: float) -> None:
        """Let it be that much later."""
        self._ahead_s += seconds
