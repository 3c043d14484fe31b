"""Process 1 of a sandbox: confine one program, enforce its limits, kill it and report its outcome.

`process.py` sends the code of this file to a new Python process inside the sandbox. So this file
imports nothing of the package and few other modules. BOOT in `process.py` defines `receive`.

Input, on stdin: a user id, the length of the program, the length of its stdin, then the program and
its stdin. When stdin closes, the program is killed.

Output, on stdout: one line `status code seconds length`, then the program's stdout (`length` bytes)
and its stderr.
"""

from __future__ import annotations  # `compile` hands it on to the program

import builtins
import os
import resource
import select
import sys
import time
from contextlib import suppress
from ctypes import CDLL, addressof, c_ulong, create_string_buffer, get_errno
from struct import pack, unpack

TYPE_CHECKING = False

CHECK_S = 0.05
"""Interval for counting memory, processes and files. An rlimit binds one process, not their sum."""
MAX_FILES = 4096
CHUNK_BYTES = 1 << 16
SIGKILL = 9
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
CAP_VERSION_3 = 0x20080522

if TYPE_CHECKING:

    def receive(count: int) -> bytes:
        """Return exactly `count` bytes of stdin; exit if stdin closes."""
        ...


libc = CDLL(None, use_errno=True)


def call(name: str, *args: object) -> int:
    """Call a function of the C library and return its result.

    Raises:
        OSError: The call failed.
    """
    c_args = [c_ulong(arg) if isinstance(arg, int) else arg for arg in args]
    code = getattr(libc, name)(*c_args)
    if code < 0:
        raise OSError(get_errno(), f"{name}{args[:1]}: {os.strerror(get_errno())}")
    return code


def drop_root(user: int) -> None:
    """Drop all capabilities and switch to `user`, an id without other processes."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    call("capset", pack("Ii", CAP_VERSION_3, 0), bytes(24))


def filter_calls(bpf_program: bytes) -> None:
    """Install a seccomp filter, which refuses system calls."""
    buffer = create_string_buffer(bpf_program, len(bpf_program))
    num_instructions = len(bpf_program) // 8
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", PR_SET_SECCOMP, 2, pack("HP", num_instructions, addressof(buffer)), 0, 0)


class Limits:
    """Limits of the program, parsed from the command line."""

    def __init__(self, arguments: list[str]) -> None:
        seccomp, seconds, memory, processes, output, disk, *self.folders = arguments
        self.filter = bytes.fromhex(seccomp)
        """Refuses system calls; empty: the program is not confined."""
        self.seconds = float(seconds)
        self.memory = int(memory)
        self.processes = int(processes)
        self.output = int(output)
        self.disk = int(disk)

    def confine(self, user: int) -> None:
        """Apply all limits to this process, irrevocably.

        Args:
            user: Id to change to if this process runs as root.
        """
        bounds = {
            resource.RLIMIT_AS: self.memory,
            resource.RLIMIT_CPU: int(self.seconds) + 60,  # a backstop: `watch` kills earlier
            resource.RLIMIT_FSIZE: self.disk,
            resource.RLIMIT_NOFILE: 128,
            resource.RLIMIT_CORE: 0,
        }
        if self.filter:  # one more for sandbox_init, which may have the same user
            bounds[resource.RLIMIT_NPROC] = self.processes + 1
        for limit, bound in bounds.items():
            resource.setrlimit(limit, (bound, bound))
        if self.filter and os.getuid() == 0:
            drop_root(user)
        call("prctl", PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
        call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)  # forks of the program cannot trace each other
        if self.filter:
            filter_calls(self.filter)

    def is_exceeded(self) -> bool:
        """Return whether the processes exceed a limit: their number, their memory, their files."""
        pids = [os.getpid()]
        num_pages = 0
        for pid in pids:  # the loop appends children
            with suppress(OSError):
                pids += children(pid)
                num_pages += private_pages(pid)
            if len(pids) > self.processes + 2:
                return True
        num_files = 0
        if self.filter:
            for folder in ("/tmp", "/dev/shm"):
                disk = os.statvfs(folder)
                num_files += disk.f_files - disk.f_ffree
        return num_pages * resource.getpagesize() > self.memory or num_files > MAX_FILES


def private_pages(pid: int) -> int:
    """Return the number of resident pages that a process does not share."""
    with open(f"/proc/{pid}/statm") as file:
        _, num_resident, num_shared, *_ = map(int, file.read().split())
    return num_resident - num_shared


def children(pid: int) -> list[int]:
    """Return the ids of a process's children."""
    child_pids: list[int] = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/children") as file:
            child_pids += map(int, file.read().split())
    return child_pids


def start(user: int, size: int, limits: Limits) -> tuple[int, dict[int, bytearray]]:
    """Fork a confined process.

    The parent receives the program's stdin only after the fork. So the child's memory holds no copy
    that the program could read ahead of time.

    Args:
        user: Id to change to if this process runs as root.
        size: Length of the program's stdin in bytes.

    Returns:
        In the parent: the child's process id and, for the pipes of its stdout and stderr, an empty
        buffer by file descriptor. In the child: 0 and no pipes.

    Raises:
        OSError: The child could not be confined.
    """
    stdin = os.memfd_create("stdin")
    out_reader, out_writer = os.pipe()
    err_reader, err_writer = os.pipe()
    ready_reader, ready_writer = os.pipe()
    go_reader, go_writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        os.dup2(stdin, 0)
        os.dup2(out_writer, 1)
        os.dup2(err_writer, 2)
        try:
            limits.confine(user)
        except Exception as error:  # noqa: BLE001  (the parent raises it)
            os.write(ready_writer, f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        os.close(ready_writer)
        os.read(go_reader, 1)
        os.closerange(3, 256)
        return 0, {}
    for descriptor in (out_writer, err_writer, ready_writer, go_reader):
        os.close(descriptor)
    with open(ready_reader, "rb") as report:
        problem = report.read()
    if problem:
        raise OSError(problem.decode())
    with open(stdin, "wb") as file:
        while size:
            size -= file.write(receive(min(size, CHUNK_BYTES)))
        file.seek(0)
    os.write(go_writer, b"x")
    os.close(go_writer)
    return pid, {out_reader: bytearray(), err_reader: bytearray()}


def watch(pid: int, buffers: dict[int, bytearray], limits: Limits) -> str:
    """Read the program's output into `buffers` until it exits or exceeds a limit.

    Returns:
        "exited" (or stdin was closed), "output", "timeout", or "killed" for another limit.
    """
    poll = select.poll()
    ended = os.pidfd_open(pid)
    for descriptor in (0, ended, *buffers):
        poll.register(descriptor, select.POLLIN)
    deadline = time.monotonic() + limits.seconds
    next_check = 0.0
    while True:
        for descriptor, _ in poll.poll(1000 * CHECK_S):
            if descriptor in (0, ended):
                return "exited"
            chunk = os.read(descriptor, CHUNK_BYTES)
            buffers[descriptor] += chunk
            if not chunk:
                poll.unregister(descriptor)
            elif len(buffers[descriptor]) > limits.output:
                return "output"
        now = time.monotonic()
        if now > deadline:
            return "timeout"
        if now > next_check:
            next_check = now + CHECK_S
            if limits.is_exceeded():
                return "killed"


def end(pid: int, buffers: dict[int, bytearray], limits: Limits) -> int:
    """Kill and reap the program and its descendants, read the rest of its output.

    Killing the process group ends fork bombs at once: a confined process cannot leave its group. An
    unconfined one can, so remaining children are killed one by one.

    Returns:
        The program's exit code; negative: the signal that killed it.
    """
    os.killpg(pid, SIGKILL)
    _, wait_status = os.waitpid(pid, 0)
    with suppress(ChildProcessError):
        while True:
            for child in children(os.getpid()):
                with suppress(ProcessLookupError):
                    os.kill(child, SIGKILL)
            os.waitpid(-1, 0)
    for descriptor, buffer in buffers.items():
        os.set_blocking(descriptor, False)
        with suppress(BlockingIOError):
            while len(buffer) <= limits.output:
                chunk = os.read(descriptor, CHUNK_BYTES)
                if not chunk:
                    break
                buffer += chunk
    return os.waitstatus_to_exitcode(wait_status)


def execute(program: bytes, folders: list[str]) -> None:
    """Run the program's source as `__main__` in this process.

    Args:
        program: Python source.
        folders: Added to `sys.path`.
    """
    main = type(sys)("__main__")
    sys.modules["__main__"] = main
    sys.argv = ["program"]
    sys.path += folders
    builtins.exit = builtins.quit = sys.exit
    try:
        exec(compile(program, "<program>", "exec"), main.__dict__)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  (print the traceback without this frame)
        trace = error.__traceback__
        error.__traceback__ = trace and trace.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def main() -> None:
    """Run one program and write its outcome to stdout."""
    limits = Limits(sys.argv[1:])
    libc.signal(2, None)  # process 1 receives SIGINT only if it has a handler: Python installs one
    call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)  # the program cannot trace this process
    os.stat("/proc/thread-self/children")  # `children` needs it: fail before the program starts
    user, length, size = unpack("<3I", receive(12))
    program = receive(length)
    begin = time.monotonic()
    pid, buffers = start(user, size, limits)
    if pid == 0:
        execute(program, limits.folders[1:])
        return
    try:
        status = watch(pid, buffers, limits)
    finally:
        code = end(pid, buffers, limits)
    if status == "exited" and code < 0:
        status = "killed"
    out, err = (bytes(buffer[: limits.output]) for buffer in buffers.values())
    seconds = time.monotonic() - begin
    head = f"{status} {code} {seconds:.6f} {len(out)}\n".encode()
    unsent = head + out + err
    while unsent:
        num_written = os.write(1, unsent)
        unsent = unsent[num_written:]
    os._exit(0)


if "receive" in globals():  # started by BOOT; an import runs nothing
    main()
