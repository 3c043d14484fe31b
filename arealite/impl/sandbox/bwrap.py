"""The command line of bubblewrap: namespaces of its own, hardly any files, no network."""

from __future__ import annotations

import os
import shutil
from pathlib import PurePath

SYSTEM = "/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache"


def command(readable: list[str], disk: int) -> list[str]:
    """Return the words before a command that may read the system's programs and `readable`, and
    keep `disk` bytes of files.

    The command is process 1 in there: all others end with it, and leave no zombie. It has to notice
    by itself when it must end: bubblewrap, killed while it starts (also by its own option
    --die-with-parent), leaves a child that waits for ever.
    """
    binds: list[str] = []
    for path in [*SYSTEM, *(path for path in readable if not path.startswith("/usr/"))]:
        for folder in [*PurePath(path).parents][-2::-1]:  # bubblewrap's own would be closed
            binds += ["--perms", "0755", "--dir", str(folder)]
        link = ["--symlink", os.readlink(path), path] if os.path.islink(path) else []
        binds += link or ["--ro-bind-try", path, path]
    if os.getuid() == 0:  # user 0 has no RLIMIT_NPROC, under whatever number: be another's parent
        user = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_KILL"]
    else:
        user = ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    spaces = [f"--unshare-{name}" for name in ("ipc", "pid", "net", "uts", "cgroup-try")]
    program = shutil.which("bwrap") or "bwrap: not on the PATH"  # it is started with another PATH
    return [
        *(program, *spaces, "--cap-drop", "ALL", *user, "--hostname", "sandbox"),
        *("--new-session", "--as-pid-1", "--proc", "/proc", "--dev", "/dev"),
        *("--ro-bind", "/dev/null", "/dev/zero"),  # shared, it is memory that nobody counts
        *("--size", str(disk), "--perms", "1777", "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *("--size", str(disk), "--perms", "1777", "--tmpfs", "/tmp", "--chdir", "/tmp"),
        *(*binds, "--remount-ro", "/", "--"),
    ]
