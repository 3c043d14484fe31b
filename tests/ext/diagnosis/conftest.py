"""Fixture that stops the monotonic clock."""

from tests.system.health.conftest import still  # noqa: F401
