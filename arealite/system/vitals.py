"""Shows from outside whether a process lives, what it waits for and what blocks it.

A thread that needs nothing of the rest, because what it watches may hang.
"""

from __future__ import annotations

from pathlib import Path


def start(name: str, folder: Path) -> None:
    """Begin to write this process's vitals to `folder`/`name`.json, about once a second."""
