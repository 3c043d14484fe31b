"""Fixtures of the server tests."""

from tests.ext.sglang.conftest import folders, model_folder, program  # noqa: F401
