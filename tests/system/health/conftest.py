"""Fixture that stops the monotonic clock."""

from __future__ import annotations

import time

import pytest


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> float:
    """Stop the monotonic clock; return its time."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    return now
