"""Files: written so that they appear whole, their ages, and the data files of the package."""

import os
import tempfile
import time
import tomllib
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any


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
