"""File locks, for a run and its ledger, which only one process at a time may use.

The kernel releases a lock when its process exits, so a lock is never stale.
"""

import fcntl
import os
import shutil
import tempfile
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


def remove_unlocked(folders: Iterable[Path]) -> None:
    """Remove the folders that no process has locked."""
    for folder in folders:
        with suppress(OSError):
            os.close(lock_folder(folder))
            shutil.rmtree(folder, ignore_errors=True)


def make_locked(parent: Path, prefix: str) -> tuple[Path, int]:
    """Make and lock `<parent>/<prefix><pid>-…` (0700); remove such folders of ended processes.

    Returns:
        The folder, and the file descriptor of its lock.
    """
    remove_unlocked(parent.glob(f"{prefix}*"))
    temporary = Path(tempfile.mkdtemp(dir=parent, prefix=f".{prefix}"))
    lock = lock_folder(temporary)  # before it has the name that `remove_unlocked` looks for
    random_suffix = temporary.name[-8:]
    folder = temporary.rename(parent / f"{prefix}{os.getpid()}-{random_suffix}")
    return folder, lock


@contextmanager
def lock_file(file: Path, *, fix: str) -> Generator[None]:
    """Lock `file` during the body.

    Args:
        file: It is created if needed, and contains the process id.
        fix: Last sentence of the error, an advice to the user.

    Raises:
        UserError: another process has locked the file.
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
