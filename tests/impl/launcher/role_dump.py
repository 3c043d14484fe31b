"""A role that writes the state of its process as JSON to stdout."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import gc
import json
import os
import re
import resource
import signal
import sys
from pathlib import Path
from typing import Any

PR_GET_PDEATHSIG = 2


def dump() -> dict[str, Any]:
    """Return what a process inherits from the process that started it, and what it sets up."""
    status = Path("/proc/self/status").read_text()
    death_signal = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(death_signal))
    main = sys.modules["__main__"]
    streams = (sys.stdin, sys.stdout, sys.stderr)
    with asyncio.Runner() as runner:
        loop = type(runner.get_loop()).__name__
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "command line": Path("/proc/self/cmdline").read_bytes().decode(errors="replace"),
        "environ of /proc": sorted(
            Path("/proc/self/environ").read_bytes().decode(errors="replace").split("\0")
        ),
        "comm": Path("/proc/self/comm").read_text(),
        "environ": dict(os.environ),
        "path": sys.path,
        "main": (main.__name__, getattr(main.__spec__, "name", None), main.__file__),
        "folder": os.getcwd(),
        "umask": re.findall(r"Umask:\s*(\d+)", status),
        "files": {number: os.readlink(f"/proc/self/fd/{number}") for number in open_files()},
        "inheritable": [os.get_inheritable(number) for number in range(3)],
        "signals": re.findall(r"Sig(?:Blk|Ign|Cgt):.*", status),
        "handlers": {number: repr(signal.getsignal(number)) for number in signal.valid_signals()},
        "leads its session": os.getsid(0) == os.getpid() == os.getpgrp(),
        "parent": os.getppid(),
        "threads": len(os.listdir("/proc/self/task")),
        "signal at the parent's death": death_signal.value,
        "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        "garbage collection": (gc.isenabled(), gc.get_threshold()),
        "faulthandler": faulthandler.is_enabled(),
        "flags": repr(sys.flags),
        "streams": [(s.encoding, s.errors, s.line_buffering, s.write_through) for s in streams],
        "seekable": [stream.seekable() for stream in streams],
        "hooks": [sys.excepthook is sys.__excepthook__, sys.gettrace(), sys.getprofile()],
        "loop": loop,
    }


def open_files() -> list[int]:
    """Return the open file descriptors."""
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    return [number for number in numbers if os.path.lexists(f"/proc/self/fd/{number}")]


if __name__ == "__main__":
    print(json.dumps(dump()))
