"""Tells the time by the clock that stamps the files of a folder.

Hosts that share a folder may have clocks minutes apart, so what is read off a file is compared with
this.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path


def folder_time(folder: Path) -> float:
    """Return what a file written in `folder` now would have as `st_mtime`; this host's time where
    none can be written."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.utime(file.fileno())  # by whoever keeps the folder, also on a full disk
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()
