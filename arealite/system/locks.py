"""A file that one process at a time may hold, for what two would spoil: a run and its ledger.

The kernel drops the lock with the process, however it ends, so no lock is ever stale.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from arealite.base.errors import UserError


@contextmanager
def held(file: Path, *, fix: str) -> Generator[None]:
    """Hold `file` for the body's time.

    Raises:
        UserError: another process holds it; names that process, and `fix` as what to do.
    """
    with file.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            owner = lock.read().strip() or "?"
            raise UserError(f"{file.parent} is in use by process {owner}. {fix}") from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield
