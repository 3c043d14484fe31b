"""The secret of a trial: 32 random bytes in a file that only its owner can read.

The processes of a trial derive their token and their ZeroMQ keys from it.
"""

import hmac
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from arealite.base.errors import UserError

FILE = "secret"
NUM_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class Secret:
    """The secret of one trial."""

    key: bytes = field(repr=False)

    @property
    def token(self) -> str:
        """The bearer token of the trial's HTTP servers."""
        return self.derive("http").hex()

    def derive(self, purpose: str) -> bytes:
        """Return 32 bytes for a purpose; they reveal neither the secret nor bytes derived for
        another purpose."""
        return hmac.digest(self.key, purpose.encode(), "sha256")


def read_secret(folder: Path) -> Secret | None:
    """Return the secret of the trial whose names are in `folder`; None if it has none.

    Raises:
        UserError: the file is not a secret, or other users can read it.
    """
    path = folder / FILE
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), encoding="ascii") as file:
            status = os.fstat(file.fileno())
            digits = file.read(1024)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the secret {path} cannot be read: {error}. Use another user.") from error
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise UserError(
            f"{path} must be yours and of mode 0600. Run chmod 600, then arealite secret --rotate."
        )
    if not re.fullmatch(rf"[0-9a-f]{{{2 * NUM_BYTES}}}\s*", digits):
        raise UserError(f"{path} is not a secret of {NUM_BYTES} bytes. Remove it.")
    return Secret(key=bytes.fromhex(digits))


def create_secret(folder: Path) -> Secret:
    """Return the trial's secret; create it if there is none. Processes may call this in parallel.

    Raises:
        UserError: the folder cannot be written.
    """
    return read_secret(folder) or put_secret(folder, os.link)


def put_secret(folder: Path, put: Callable[[str, Path], None]) -> Secret:
    """Write a new secret to a temporary file; `put` (os.link or os.replace) moves it in place."""
    name = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        handle, name = tempfile.mkstemp(dir=folder, prefix=".secret-")  # mode 0600
        with open(handle, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(NUM_BYTES) + "\n")
        with suppress(FileExistsError):  # another process of the trial was faster
            put(name, folder / FILE)
    except OSError as error:
        raise UserError(
            f"cannot write the secret in {folder}: {error.strerror}. "
            "Set cluster.name_root to a folder that is writable."
        ) from error
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)
    secret = read_secret(folder)
    assert secret is not None
    return secret
