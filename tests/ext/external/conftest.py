"""Fixtures of the server tests."""

from tests.impl.server.conftest import folders, model_folder, program  # noqa: F401
