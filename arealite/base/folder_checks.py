"""Check folder names, folders and addresses of a config before any process starts."""

import errno
import re
import shutil
import socket
import tempfile
from pathlib import Path

from arealite.base.errors import UserError

PORT_ERRORS = (errno.EADDRINUSE, errno.EACCES, errno.EINVAL)
"""Errors of an address whose port is wrong, not its host."""


def check_name(key: str, name: str) -> None:
    """Raise UserError if the value `name` of option `key` is no valid folder name."""
    if not re.fullmatch(r"\w[\w.-]{0,199}", name):
        raise UserError(f"{key}={name!r}: use letters, digits, '_', '-' and '.', up to 200.")


def check_folder(folder: Path, purpose: str, key: str) -> int:
    """Check that a folder can be created and written; return the free bytes of its disk.

    Args:
        folder: An absolute path; the folder may be missing and is not created.
        purpose: The folder's purpose, for the error.
        key: The option that sets it, for the error.

    Raises:
        UserError: The folder is not writable, or its disk is full.
    """
    try:
        existing = folder.absolute()
        while not existing.is_symlink() and not existing.exists():
            existing = existing.parent
        with tempfile.TemporaryFile(dir=existing, buffering=0) as probe:
            probe.write(bytes(4096))
            return shutil.disk_usage(existing).free
    except OSError as error:
        raise UserError(
            f"{purpose} {folder} cannot be written: {error.strerror}. "
            f"Set {key} to a folder that is writable."
        ) from error


def check_address(host: str, port: int = 0, *, at: str) -> None:
    """Check that this process can listen at an address.

    Args:
        host: Name or address; "": all interfaces.
        port: The port; 0: any free port.
        at: The config section whose options `host` and `port` set the address, for the error.

    Raises:
        UserError: The host is no address of this machine, or the port is in use.
    """
    flags = socket.AI_PASSIVE
    is_number = re.fullmatch(r"[\d.]*", host)
    if is_number:
        flags |= socket.AI_NUMERICHOST
    try:
        if port >> 16:  # getaddrinfo would use the last 16 bits
            raise OSError(errno.EINVAL, "no such port")
        addresses = socket.getaddrinfo(
            host or None,
            port,
            type=socket.SOCK_STREAM,
            flags=flags,
        )
        family, _, _, _, address = addresses[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        option = f"{at}.host={host}"
        advice = "Use one of this machine"
        if getattr(error, "errno", None) in PORT_ERRORS:
            option = f"{at}.port={port}"
            advice = "Use another port, or 0 for a free one"
        raise UserError(f"{option}: cannot listen on {host}:{port}: {reason}. {advice}.") from error
