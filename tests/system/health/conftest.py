"""A clock that stands."""

from __future__ import annotations

import time

import pytest


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> float:
    """Let no time pass, by the clock that processes of one host share; return what it shows."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    return now
