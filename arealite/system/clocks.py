"""The clock of a folder's file system.

Hosts that share a folder may have clocks that differ by minutes. The age of a file is therefore
computed with the clock of the folder, which also sets modification times.
"""

import os
import tempfile
import time
from pathlib import Path


def folder_time(folder: Path) -> float:
    """Return the `st_mtime` that a file written in `folder` now gets.

    If the folder is not writable, this is the host's time.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.utime(file.fileno())  # by the file server's clock; works on a full disk
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()
