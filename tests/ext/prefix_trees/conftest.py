"""Fixtures of the core engine's tests."""

from tests.impl.engine.conftest import group, model, untied  # noqa: F401
