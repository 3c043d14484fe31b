"""Real processes that write vitals and misbehave, and hand-written vitals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from arealite.system.health import vitals
from arealite.system.health.vitals import Vitals, Waits
from tests.waiting import until

MY_START = (vitals.process_state(os.getpid()) or ("", 0))[1]

HEAD = """
import asyncio, os, re, signal, sys, threading, time
from pathlib import Path
from arealite.base import log
from arealite.system.health import vitals
from arealite.system.health import waits
name, folder = sys.argv[1], Path(sys.argv[2])
log.setup(name)
vitals.start(name, folder)
def forever():
    threading.Event().wait()
"""

IDLE = "forever()"
WAITS = """
with waits.Wait(event="batch 12", owner="trainer rank 0", on="datapipe-0"):
    forever()
"""
ONLY_HERE = """
usual, vitals.BLOCKED_S = vitals.BLOCKED_S, 600
def block():
    vitals.BLOCKED_S = usual
    time.sleep(600)
"""
"""Report only the call to `block`, and no earlier delay by a busy machine."""
BLOCKED = (
    ONLY_HERE
    + """
async def main():
    vitals.watch(asyncio.get_running_loop())
    await asyncio.sleep(0.3)
    block()
asyncio.run(main())
"""
)
BLOCKED_UVLOOP = (
    ONLY_HERE
    + """
import uvloop
async def main():
    await asyncio.sleep(0.3)
    block()
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    vitals.watch(runner.get_loop())
    runner.run(main())
"""
)
BURSTS = """
async def main():
    vitals.watch(asyncio.get_running_loop())
    while True:
        await asyncio.sleep(0.1)
        end = time.thread_time() + 0.5
        while time.thread_time() < end:
            pass
asyncio.run(main())
"""
"""Late only if it shares its CPU with other processes."""
HOLDS_THE_INTERPRETER = """
time.sleep(0.3)
re.match(r"(a+)+$", "a" * 60 + "b")
"""


@contextlib.contextmanager
def living(name: str, folder: Path, script: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `script` as role `name`; yield when its vitals are written; kill it at the end."""
    with (folder / f"{name}.log").open("wb") as log:
        command = [sys.executable, "-c", HEAD + script, name, str(folder)]
        process = subprocess.Popen(command, stderr=log, stdout=log)
    try:
        until(lambda: shown(name, folder), what=f"vitals of {name}")
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait()


def innermost(stack: str) -> str:
    """Return the last call of a stack."""
    return stack.rpartition("  File ")[2]


def shown(name: str, folder: Path) -> dict[str, Any]:
    """Return the vitals of a role; {} while there are none."""
    with contextlib.suppress(OSError):
        return json.loads((folder / f"{name}.json").read_text())
    return {}


def wait(
    what: str, on: str, waited_s: float, *, quiet_s: float | None = None, **more: Any
) -> Waits:
    quiet_s = waited_s if quiet_s is None else quiet_s
    known = {"owner": "x", "seconds": None, "replies_soon": False, "detail": ""}
    return Waits(event=what, on=on, waited_s=waited_s, quiet_s=quiet_s, **(known | more))


def show(folder: Path, name: str, *waits: Waits, age_s: float = 0.0, **more: Any) -> None:
    """Write the vitals of a live role with the pid of this process, dated `age_s` ago.

    With `age_s` 0, the vitals stay new for a minute, however slow the test is.
    """
    known: dict[str, Any] = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": MY_START,
        "stacks": f"{name}.stacks",
        "clock": time.monotonic() - (age_s or -60.0),
        "awake_s": 1000.0,
    }
    file = folder / f"{name}.json"
    file.write_bytes(msgspec.json.encode(Vitals(name=name, **(known | more), waits=list(waits))))
    os.utime(file, (time.time() - age_s,) * 2)
