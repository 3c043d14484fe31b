"""Fixtures of the server tests, and of the trainer's process group."""

from tests.ext.sglang.conftest import folders, model_folder, program  # noqa: F401
from tests.impl.engine.conftest import group  # noqa: F401
