"""The command line of bubblewrap: namespaces of its own, hardly any files, no network."""

from __future__ import annotations

import os

SYSTEM = "/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache"


def command(readable: list[str], disk: int) -> list[str]:
    """Return the words before a command that may read the system's programs and `readable`, and
    keep `disk` bytes of files.

    The command is process 1 in there: all others end with it, and leave no zombie.
    """
    binds: list[str] = []
    for path in [*SYSTEM, *(path for path in readable if not path.startswith("/usr/"))]:
        if os.path.islink(path):
            binds += ["--symlink", os.readlink(path), path]
        else:
            binds += ["--ro-bind-try", path, path]
    return [
        *("bwrap", "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534"),
        *("--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"),
        *("--hostname", "sandbox", *binds, "--proc", "/proc", "--dev", "/dev"),
        *("--size", str(disk), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *("--size", str(disk), "--tmpfs", "/tmp", "--chdir", "/tmp", "--remount-ro", "/", "--"),
    ]
