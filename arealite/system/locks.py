"""A file that one process at a time may hold, for what two would spoil: a run and its ledger.

The kernel drops the lock with the process, however it ends, so no lock is ever stale.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path

from arealite.base.errors import UserError


def lock_folder(folder: Path) -> int:
    """Lock a folder until the returned file descriptor is closed.

    Raises:
        OSError: another process holds the lock.
    """
    handle = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return handle


def remove_unheld(folders: Iterable[Path]) -> None:
    """Remove the folders that no process has locked; the kernel releases a dead process's locks."""
    for folder in folders:
        with suppress(OSError):
            os.close(lock_folder(folder))
            shutil.rmtree(folder, ignore_errors=True)


def holder(file: Path) -> int:
    """Return the id of this host's process that holds `file`; 0 if none does. Takes no lock."""
    with suppress(OSError, ValueError):
        pid = int(file.read_text())
        opened = [os.path.realpath(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        return pid if os.path.realpath(file) in opened else 0
    return 0


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
