"""Run each program in bubblewrap, as a child of a new `sandbox_init` process.

`sandbox_init` kills its program when its own stdin closes: when a run is cancelled, and when the
worker dies.
"""

import asyncio
import marshal
import os
import shutil
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path, PurePath
from random import random
from struct import pack
from typing import Any

from arealite.base.errors import DeadlineError, UserError
from arealite.base.log import get
from arealite.ext.sandbox.config import Outcome, SandboxConfig, SandboxFailed
from arealite.ext.sandbox.seccomp import seccomp_filter
from arealite.system.health.waits import Wait

log = get(__name__)

START_S = 60.0
END_S = 30.0
PROBE_S = 30.0
SYSTEM = "/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache"
"""Files and folders that programs may read, in addition to those of Python."""
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp"}
PROCESS_OPTIONS: Any = {
    "stdin": PIPE,
    "stdout": PIPE,
    "stderr": PIPE,
    "start_new_session": True,
    "cwd": "/",
    "env": ENVIRONMENT,
}
"""A new session receives no signals of the terminal, and gets its own scheduling group."""
BOOT = """import marshal, os
def receive(count):
    received = b""
    while len(received) < count:
        received += os.read(0, count - len(received)) or os._exit(0)
    return received
exec(marshal.loads(receive(int.from_bytes(receive(4), "little"))))"""
"""Program of the new Python process: it reads the code of `sandbox_init` from stdin and runs it."""
PROBE = "import os\nif os.fork() == 0: os._exit(0)\nos.wait()\nprint('works')"
USERS = cycle(sorted(range(60000, 65000), key=lambda _: random()))
"""User ids for programs if this process runs as root. The kernel counts processes per user, so each
program has a limit of its own. No file belongs to these users."""


class Sandbox:
    """Runs Python programs, each confined in its own process. All episodes share one sandbox."""

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self.command = command(config)
        self._slots = asyncio.Semaphore(config.concurrency)

    async def setup(self) -> None:
        """Check that this host can confine programs: run one that forks.

        Raises:
            UserError: This host cannot; the message says what to install or set.
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
            f"this host cannot confine programs: {problem}. "
            "Run `apt install bubblewrap` and allow user namespaces. "
            "Or set sandbox.backend=unsafe: programs then run with all rights of this user."
        )

    async def run(self, program: str, *, stdin: str = "") -> Outcome:
        """Run a program until it exits or reaches a limit. Cancelling this call kills the program.

        When this call returns, all processes of the program have ended.

        Args:
            program: Python source.
            stdin: Standard input of the program.

        Raises:
            SandboxFailed: The sandbox could not start or end the program.
        """
        encoded_request = request(program, stdin)
        async with self._slots:
            wait = Wait(
                event="a program in the sandbox",
                owner="sandbox",
                on="sandbox_init",
                seconds=START_S + self.config.timeout_s,
            )
            try:
                with wait:
                    process = await spawn(self.command)
                    try:
                        stdout, stderr = await communicate(process, encoded_request)
                        return outcome(stdout, stderr)
                    finally:
                        await stop(process)
            except (DeadlineError, OSError) as error:
                raise SandboxFailed(f"{self.config.backend}: {error}") from error


@cache
def init_code() -> bytes:
    """Return the marshalled code of `sandbox_init`; compiling takes longer than most runs."""
    file = Path(__file__).with_name("sandbox_init.py")
    return marshal.dumps(compile(file.read_text(), "<sandbox_init>", "exec"))


def command(config: SandboxConfig) -> list[str]:
    """Return the command that starts Python for `sandbox_init`, in bubblewrap if confined."""
    folders = [sys.base_prefix]
    if config.packages:
        folders.append(config.packages)
    disk_bytes = config.disk_mb << 20
    confinement: list[str] = []
    seccomp = b""
    if config.backend == "bwrap":
        confinement = bubblewrap(folders, disk_bytes)
        seccomp = seccomp_filter()
    python = [os.path.realpath(sys.executable), "-I", "-S", "-c", BOOT]
    limits = [  # in the order of `sandbox_init.Limits`
        seccomp.hex(),
        str(config.timeout_s),
        str(config.memory_mb << 20),
        str(config.processes),
        str(config.output_kb << 10),
        str(disk_bytes),
    ]
    return [*confinement, *python, *limits, *folders]


def bubblewrap(
    readable: list[str], disk: int, *, binds: Sequence[str] = (), folder: str = "/tmp"
) -> list[str]:
    """Return the arguments of bubblewrap that precede the confined command.

    The confined command is process 1 of a PID namespace, so the kernel kills and reaps all other
    processes when it exits. It must notice the end of its parent itself: the option
    --die-with-parent is not used, because a bubblewrap that is killed while it starts leaves a
    child that blocks forever.

    Args:
        readable: Folders that the command may read, in addition to SYSTEM.
        disk: Bytes of files that the command may keep in /tmp; the same again in /dev/shm.
        binds: Further arguments that bind files, in the order of bubblewrap.
        folder: The command's working directory.
    """
    system: list[str] = []
    outside_usr = [path for path in readable if not path.startswith("/usr/")]
    for path in [*SYSTEM, *outside_usr]:
        system += _bind_readable(path)
    if os.getuid() == 0:  # RLIMIT_NPROC does not bind root: sandbox_init changes to another user
        user = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_KILL"]
    else:
        user = ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    unshare = [f"--unshare-{name}" for name in ("ipc", "pid", "net", "uts", "cgroup-try")]
    program = shutil.which("bwrap") or "bwrap: not on the PATH"  # PROCESS_OPTIONS changes the PATH
    return [
        *(program, *unshare, "--cap-drop", "ALL", *user, "--hostname", "sandbox"),
        *("--new-session", "--as-pid-1", "--proc", "/proc", "--dev", "/dev"),
        *("--ro-bind", "/dev/null", "/dev/zero"),  # shared mappings of it escape the memory limit
        *("--size", str(disk), "--perms", "1777", "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *("--size", str(disk), "--perms", "1777", "--tmpfs", "/tmp", "--chdir", folder),
        *(*system, *binds, "--remount-ro", "/", "--"),
    ]


def _bind_readable(path: str) -> list[str]:
    """Return the arguments of bubblewrap that show a file or folder, and create its parents."""
    arguments: list[str] = []
    parents_below_root = [*PurePath(path).parents][-2::-1]
    for parent in parents_below_root:  # implicit parents are not readable
        arguments += ["--perms", "0755", "--dir", str(parent)]
    if os.path.islink(path):
        arguments += ["--symlink", os.readlink(path), path]
    else:
        arguments += ["--ro-bind-try", path, path]
    return arguments


def request(program: str, stdin: str) -> bytes:
    """Return the stdin of a new process: the code of `sandbox_init`, then its request.

    Characters that UTF-8 cannot encode become "?".
    """
    code = init_code()
    encoded_program = program.encode(errors="replace")
    encoded_stdin = stdin.encode(errors="replace")
    lengths = pack("<3I", next(USERS), len(encoded_program), len(encoded_stdin))
    return pack("<I", len(code)) + code + lengths + encoded_program + encoded_stdin


async def spawn(command: list[str], **options: Any) -> Process:
    """Start a process. If cancelled, wait until it has started and stop it.

    A process that is killed while it starts could leave children.

    Args:
        command: Its command line.
        **options: Options of the process in place of PROCESS_OPTIONS.
    """
    creating = asyncio.create_subprocess_exec(*command, **PROCESS_OPTIONS | options)
    starting = asyncio.ensure_future(creating)
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        with suppress(OSError):
            await stop(await starting)
        raise


async def communicate(process: Process, stdin: bytes) -> tuple[bytes, bytes]:
    """Write `stdin` to the process; return its whole stdout and stderr."""
    assert process.stdin and process.stdout and process.stderr
    with suppress(ConnectionError):  # the process failed: its stderr holds the reason
        process.stdin.write(stdin)
        await process.stdin.drain()
    return await process.stdout.read(), await process.stderr.read()


async def stop(process: Process) -> None:
    """Make `sandbox_init` kill its program; return when all processes have ended."""
    assert process.stdin and process.stdout
    process.stdin.close()
    try:
        with Wait(event="its end", owner="sandbox", on="sandbox_init", seconds=END_S):
            with suppress(RuntimeError):  # a cancelled `communicate` still reads
                await process.stdout.read()
            await process.wait()
    except DeadlineError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def outcome(stdout: bytes, stderr: bytes) -> Outcome:
    """Parse the output of `sandbox_init`.

    Raises:
        SandboxFailed: The output holds no outcome; the message is the end of `stderr`.
    """
    head, _, outputs = stdout.partition(b"\n")
    fields = head.decode().split()
    if len(fields) != 4:
        problem = stderr.decode(errors="replace").strip()[-500:]
        raise SandboxFailed(problem or "sandbox_init was killed")
    status: Any
    status, code, seconds, num_stdout_bytes = fields
    program_stdout = outputs[: int(num_stdout_bytes)]
    program_stderr = outputs[int(num_stdout_bytes) :]
    return Outcome(
        status=status,
        code=int(code),
        stdout=program_stdout.decode(errors="replace"),
        stderr=program_stderr.decode(errors="replace"),
        seconds=float(seconds),
    )
