"""The demo's kit, created once per session."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import tutorial


@pytest.fixture(scope="session")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the demo's model and data once per session, in the first process that needs them."""
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if root.name.startswith("popen-") else root) / "kit"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, "tools/demo_task.py", str(folder)]
        subprocess.run(command, cwd=tutorial.ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder
