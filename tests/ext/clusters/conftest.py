"""Fixtures of the launcher's tests."""

from tests.impl.launcher.conftest import ledger, longer_limits, waits_for_roles  # noqa: F401
