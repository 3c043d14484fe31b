"""A plugin: the first publish of version 1 blocks after staging, until the process is killed.

The file in the environment variable STALLED has the id of this process and the path of its weights.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

FILE = Path(__file__)

if "RANK" in os.environ:  # only in a trainer: other roles need no torch
    from arealite.impl.publisher.disk import DiskPublisher

    push = DiskPublisher.push

    def stall(self: Any, version: int) -> Any:
        told = Path(os.environ["STALLED"])
        if version == 1 and not told.exists():
            new = told.with_suffix(".new")
            new.write_text(f"{os.getpid()} {self.folder / f'v{version}'}")
            new.replace(told)
            threading.Event().wait()
        return push(self, version)

    DiskPublisher.push = stall  # type: ignore[method-assign]
