"""Writes files that appear whole, with the mode that the umask gives."""

import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path


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
