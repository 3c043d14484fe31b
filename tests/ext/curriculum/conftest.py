"""Fixtures of the datapipe's tests."""

from tests.system.datapipe.conftest import open_store  # noqa: F401
