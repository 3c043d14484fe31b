"""Checks the folder names, folders and addresses that a config gives for this machine.

Shared by the name registry, servers and commands; they check before they start anything.
"""

from __future__ import annotations

import errno
import re
import shutil
import socket
import tempfile
from pathlib import Path

from arealite.base.errors import UserError


def check_name(key: str, name: str) -> None:
    """Raise UserError if the value `name` of option `key` cannot be the name of a folder."""
    if not re.fullmatch(r"\w[\w.-]{0,199}", name):
        raise UserError(f"{key}={name!r}: use letters, digits, '_', '-' and '.', up to 200.")


def check_folder(folder: Path, what: str, key: str) -> int:
    """Check that a folder can be made and written, leave nothing there, and return the free bytes.

    Args:
        folder: absolute; it may be missing.
        what: The folder's purpose, for the error.
        key: the option that sets it.

    Raises:
        UserError: the folder cannot be written, or its disk is full.
    """
    try:
        there = next(p for p in (folder, *folder.parents) if p.is_symlink() or p.exists())
        with tempfile.TemporaryFile(dir=there, buffering=0) as probe:
            probe.write(bytes(4096))
            return shutil.disk_usage(there).free
    except OSError as error:
        fix = f"Set {key} to a folder that is writable."
        raise UserError(f"{what} {folder} cannot be written: {error.strerror}. {fix}") from error


def check_address(host: str, port: int = 0, *, at: str) -> None:
    """Check that this process can listen at an address; `at`.host and `at`.port name the options.

    Raises:
        UserError: the host is no address of this machine, or the port is in use.
    """
    flags = socket.AI_PASSIVE | (0 if re.search(r"[^\d.]", host) else socket.AI_NUMERICHOST)
    try:
        if port >> 16:  # getaddrinfo would take its last 16 bits
            raise OSError(errno.EINVAL, "no such port")
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=flags)
        with socket.socket(found[0][0], socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(found[0][4])
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        is_used = getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES, errno.EINVAL)
        wrong = f"{at}.port={port}" if is_used else f"{at}.host={host}"
        fix = "Use another, or 0 for a free one" if is_used else "Give one of this machine's"
        raise UserError(f"{wrong}: cannot listen on {host}:{port}: {why}. {fix}.") from error
