"""Files: written so that they appear whole, their ages, their locks, and the package's data files.

Hosts that share a folder may have clocks that differ by minutes. The age of a file is therefore
computed with the clock of the folder, which also sets modification times.
"""

import fcntl
import os
import shutil
import tempfile
import time
import tomllib
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from arealite.base.errors import UserError


def cache_folder() -> Path:
    """Return the folder for files of AReaLite in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "arealite"


@contextmanager
def replacing(file: Path) -> Generator[Path]:
    """Yield a temporary path beside `file`, and rename it to `file` after the body.

    If the body raises, `file` stays as it was, and the temporary file is removed.
    """
    temporary = file.parent / f".{file.name}.{os.getpid()}.tmp"
    try:
        yield temporary
        temporary.replace(file)
    finally:
        with suppress(OSError):  # renamed, or never created
            temporary.unlink()


def follow_umask(files: Iterable[Path]) -> None:
    """Give files the mode of a new file: safetensors writes 0600, whatever the umask is."""
    for file in files:
        # A new file asks the kernel: to read the umask, a process must set it for all its threads.
        example = file.with_name(f".{file.name}.{os.getpid()}.mode")
        example.touch()
        file.chmod(example.stat().st_mode)
        example.unlink()


@cache
def read_toml(module: str, name: str) -> dict[str, Any]:
    """Return the data of a TOML file beside a module, which passes its `__file__`."""
    return tomllib.loads(Path(module).with_name(name).read_text(encoding="utf-8"))


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


def lock_folder(folder: Path) -> int:
    """Lock a folder until the returned file descriptor is closed.

    The kernel releases a lock when its process exits, so a lock is never stale.

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
