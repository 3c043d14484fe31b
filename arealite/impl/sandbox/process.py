"""The sandbox: runs each program in bubblewrap, under a warden of its own.

A warden ends its program when its stdin ends. So a cancelled run, a killed worker and a late
program end in the same way.
"""

from __future__ import annotations

import asyncio
import marshal
import os
import shutil
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path, PurePath
from random import random
from struct import pack
from typing import Any

from arealite.api.sandbox import Outcome, SandboxConfig, SandboxFailed
from arealite.base.errors import DeadlineError, UserError
from arealite.base.log import get
from arealite.system.health.waits import Wait

log = get(__name__)

START_S, END_S, PROBE_S = 60.0, 30.0, 30.0
SYSTEM = "/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache"
"""Files and folders that programs may read, besides Python's."""
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp"}
PLACE: Any = {
    **{"stdin": PIPE, "stdout": PIPE, "stderr": PIPE},
    **{"cwd": "/", "env": ENVIRONMENT, "start_new_session": True},
}
"""A session of its own is not told of this terminal's signals, and has its share of the cores."""
BOOT = """import marshal, os
def receive(count):
    text = b""
    while len(text) < count:
        text += os.read(0, count - len(text)) or os._exit(0)
    return text
exec(marshal.loads(receive(int.from_bytes(receive(4), "little"))))"""
PROBE = "import os\nif os.fork() == 0: os._exit(0)\nos.wait()\nprint('works')"
USERS = cycle(sorted(range(60000, 65000), key=lambda _: random()))
"""Ids for programs where this process is root's: each has one of its own, and so its own limit on
processes; no file is theirs."""


class Sandbox:
    """Runs Python programs, each confined in a process of its own; shared by all episodes."""

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self.command = command(config)
        self._slots = asyncio.Semaphore(config.concurrency)

    async def setup(self) -> None:
        """Check that this host can confine programs, by running one that forks.

        Raises:
            UserError: it cannot; the text says what to install or set.
        """
        if self.config.backend == "unsafe":
            log.warning("programs run unconfined", setting="sandbox.backend=unsafe")
            return
        try:
            done = await Sandbox(replace(self.config, timeout_s=PROBE_S)).run(PROBE)
            if done.stdout == "works\n":
                return
            problem = f"a program cannot fork: {done.stderr[-300:]}"
        except SandboxFailed as error:
            problem = str(error)
        raise UserError(
            f"this host cannot confine programs: {problem}. `apt install bubblewrap` and allow "
            "user namespaces; or set sandbox.backend=unsafe where programs may do what this user "
            "may."
        )

    async def run(self, program: str, *, stdin: str = "") -> Outcome:
        """Run a program to its end, or kill it at a limit; cancelling kills it, too.

        When this returns, nothing of the program is left.

        Raises:
            SandboxFailed: the sandbox could not start or end the program.
        """
        seconds = START_S + self.config.timeout_s
        what, text = "a program in the sandbox", request(program, stdin)
        async with self._slots:
            try:
                with Wait(what, owner="sandbox", on="warden", seconds=seconds):
                    process = await spawn(self.command)
                    try:
                        return outcome(*await ask(process, text))
                    finally:
                        await end(process)
            except (DeadlineError, OSError) as error:
                raise SandboxFailed(f"{self.config.backend}: {error}") from error


@cache
def warden() -> bytes:
    """Return the warden, compiled: that takes longer than most programs."""
    file = Path(__file__).with_name("warden.py")
    return marshal.dumps(compile(file.read_text(), "<warden>", "exec"))


def command(config: SandboxConfig) -> list[str]:
    """Return the command that starts a warden, whose code comes first on its stdin."""
    folders = [sys.base_prefix, *([config.packages] if config.packages else [])]
    sizes = config.memory_mb << 20, config.processes, config.output_kb << 10, config.disk_mb << 20
    words = [config.backend, config.timeout_s, *sizes, *folders]
    outside = bubblewrap(folders, config.disk_mb << 20) if config.backend == "bwrap" else []
    python = [os.path.realpath(sys.executable), "-I", "-S", "-c", BOOT]
    return [*outside, *python, *map(str, words)]


def bubblewrap(readable: list[str], disk: int) -> list[str]:
    """Return the command line of bubblewrap before the command that it confines.

    The command is process 1 in its namespaces: all others end with it, and leave no zombie. It has
    to notice by itself when it must end: bubblewrap, killed while it starts (also by its own option
    --die-with-parent), leaves a child that waits for ever.

    Args:
        readable: Folders that the command may read, besides the system's programs.
        disk: Bytes of files that it may keep in /tmp, and as many in /dev/shm.
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


def request(program: str, stdin: str) -> bytes:
    """Return what a warden is told, after its own code; what no file could hold becomes "?"."""
    code, texts = warden(), (program.encode(errors="replace"), stdin.encode(errors="replace"))
    head = pack("<I", len(code)) + code + pack("<3I", next(USERS), *map(len, texts))
    return head + b"".join(texts)


async def spawn(words: list[str]) -> Process:
    """Start a warden. Cancelled, wait for it and end it: killed while it starts, it could stay."""
    starting = asyncio.ensure_future(asyncio.create_subprocess_exec(*words, **PLACE))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        with suppress(OSError):
            await end(await starting)
        raise


async def ask(process: Process, text: bytes) -> tuple[bytes, bytes]:
    """Tell a warden its program; return all that it writes."""
    assert process.stdin and process.stdout and process.stderr
    with suppress(ConnectionError):  # it failed, and says why
        process.stdin.write(text)
        await process.stdin.drain()
    return await process.stdout.read(), await process.stderr.read()


async def end(process: Process) -> None:
    """Have the warden end its program, and wait until nothing is left."""
    assert process.stdin and process.stdout
    process.stdin.close()
    try:
        with Wait("its end", owner="sandbox", on="warden", seconds=END_S):
            with suppress(RuntimeError):  # a read that was cut still waits
                await process.stdout.read()
            await process.wait()
    except DeadlineError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def outcome(answer: bytes, problem: bytes) -> Outcome:
    """Read a warden's answer.

    Raises:
        SandboxFailed: there is none.
    """
    head, _, texts = answer.partition(b"\n")
    words = head.decode().split()
    if len(words) != 4:
        raise SandboxFailed(problem.decode(errors="replace").strip()[-500:] or "it was killed")
    size = int(words[3])
    out, err = (text.decode(errors="replace") for text in (texts[:size], texts[size:]))
    status: Any = words[0]
    return Outcome(status, int(words[1]), out, err, float(words[2]))
