"""Tells whether a folder is a version that a publisher of this host has staged in memory."""

from pathlib import Path

from arealite.base.trial_files import TMPFS


def is_staged_in_memory(folder: Path) -> bool:
    """Return whether a publisher has written a folder to memory; its files never change.

    A tensor may therefore be the mapped memory of its file. When the publisher removes the file,
    the memory stays until the server has loaded other weights.
    """
    if not folder.is_relative_to(TMPFS):
        return False
    parents = folder.relative_to(TMPFS).parts[:-1]
    return bool(parents) and parents[0].startswith("arealite-")
