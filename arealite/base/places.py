"""Check folder names, folders and addresses of a config before any process starts."""

import errno
import re
import shutil
import socket
import tempfile
from pathlib import Path

from arealite.base.errors import UserError


def check_name(key: str, name: str) -> None:
    """Raise UserError if the value `name` of option `key` is no valid folder name."""
    if not re.fullmatch(r"\w[\w.-]{0,199}", name):
        raise UserError(f"{key}={name!r}: use letters, digits, '_', '-' and '.', up to 200.")


def check_folder(folder: Path, what: str, key: str) -> int:
    """Check that a folder can be created and written; return the free bytes of its disk.

    Args:
        folder: An absolute path; the folder may be missing and is not created.
        what: The folder's purpose, for the error.
        key: The option that sets it, for the error.

    Raises:
        UserError: The folder is not writable, or its disk is full.
    """
    try:
        existing = next(p for p in (folder, *folder.parents) if p.is_symlink() or p.exists())
        with tempfile.TemporaryFile(dir=existing, buffering=0) as probe:
            probe.write(bytes(4096))
            return shutil.disk_usage(existing).free
    except OSError as error:
        fix = f"Set {key} to a folder that is writable."
        raise UserError(f"{what} {folder} cannot be written: {error.strerror}. {fix}") from error


def check_address(host: str, port: int = 0, *, at: str) -> None:
    """Check that this process can listen at an address.

    Args:
        host: Name or address; "": all interfaces.
        port: The port; 0: any free port.
        at: The config section whose options `host` and `port` set the address, for the error.

    Raises:
        UserError: The host is no address of this machine, or the port is in use.
    """
    flags = socket.AI_PASSIVE | (0 if re.search(r"[^\d.]", host) else socket.AI_NUMERICHOST)
    try:
        if port >> 16:  # getaddrinfo would use the last 16 bits
            raise OSError(errno.EINVAL, "no such port")
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=flags)
        with socket.socket(found[0][0], socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(found[0][4])
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        is_used = getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES, errno.EINVAL)
        wrong = f"{at}.port={port}" if is_used else f"{at}.host={host}"
        fix = "Use another port, or 0 for a free one" if is_used else "Use one of this machine"
        raise UserError(f"{wrong}: cannot listen on {host}:{port}: {why}. {fix}.") from error
