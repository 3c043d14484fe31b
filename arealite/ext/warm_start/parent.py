"""The warm parent: a process that has imported modules, and forks roles that need no imports.

Its supervisor (`warm_starts`) sends requests over a socket, `control`. The warm parent forks an
intermediate process, which forks the role and exits. The kernel then makes the role a child of the
supervisor, because the supervisor is a subreaper during the request. The role waits on another
socket, `line`, until the supervisor has its process id. If the supervisor gives up, or exits, the
role exits before it has done anything.

The warm parent has one thread, uses no CUDA, and imports no modules of users.
"""

import atexit
import ctypes
import gc
import importlib
import io
import json
import os
import re
import runpy
import select
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakSet

from arealite.impl.launcher.processes import PARENT, die_with_parent

IMPORTED = b"i"
"""Answer of the warm parent: one more stage of modules is imported."""
FORKED = b"f"
"""Answer: a role was forked, and the process in between has exited."""
REFUSED = b"r"
"""Answer: this process cannot fork."""
GO = b"g"
"""Message to a role: it may begin."""
HEADER = struct.Struct("!I")
"""Length of a request. Its file descriptors come with the header."""
NUM_DESCRIPTORS = 5
PR_SET_MM = 35
PR_SET_MM_MAP = 14
MEMORY_MAP = struct.Struct("=12QIi")
"""The kernel's struct prctl_mm_map: begin and end of code and of data, begin and end of the heap,
begin of the stack, begin and end of arguments and of environment; then auxv, its length, and a file
descriptor, which stay as they are."""
THREADS = "OMP_NUM_THREADS"
BLAS_THREADS = "OPENBLAS_NUM_THREADS"
"""numpy starts threads at its import unless this variable is 1."""
FLUSH_FAILED = 120
"""Exit code of an interpreter that cannot write its output."""
_frozen_files = WeakSet[io.IOBase]()
is_warm = False
"""Whether this process is a role that a warm parent forked."""


@dataclass(frozen=True, kw_only=True)
class RoleStart:
    """A role to start."""

    words: list[str]
    """Command line."""
    environment: dict[str, str]
    line: int
    """File descriptor of the socket on which the role reports its process id, and receives GO."""
    folder: int
    """File descriptor of the working directory."""
    streams: Sequence[int]
    """File descriptors of stdin, stdout and stderr."""


class Forked(BaseException):
    """Ends the work of a process that has become a role; `main` then runs the role."""

    def __init__(self, request: RoleStart) -> None:
        super().__init__()
        self.request = request


def main() -> NoReturn:
    """Import the modules named on the command line, and fork roles until the supervisor exits.

    In a role, run its command, and exit or raise as the command does.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    stages: list[list[str]] = json.loads(sys.argv[2])
    die_with_parent()
    request = serve(control, stages)
    while True:
        try:
            run(request)
        except Forked as forked:
            request = forked.request


def fork_warm_parent(control: socket.socket, supervisor_end: socket.socket) -> int:
    """Fork a warm parent from this process, which is itself a role of a warm parent.

    Call it before the process has a thread, and before it has imported a module of the user.

    Args:
        control: The end of the warm parent.
        supervisor_end: The other end, which this process keeps.

    Returns:
        The process id of the warm parent.

    Raises:
        Forked: This process is a role that the new warm parent forked.
    """
    supervisor = os.getpid()
    if pid := os.fork():
        return pid
    try:
        supervisor_end.close()
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        os.close(null)
        os.environ[PARENT] = str(supervisor)
        die_with_parent()
        request = serve(control, [])
    except BaseException:  # noqa: BLE001  (this process must not return to the caller's code)
        os._exit(1)
    raise Forked(request)


def serve(control: socket.socket, stages: Sequence[Sequence[str]]) -> RoleStart:
    """Import modules, and fork roles. Waits for: the supervisor. Unblocks: the supervisor.

    Returns:
        The request of a role; only in that role.
    """
    show_command(["arealite warm parent", f"of {os.getppid()}"], os.environ)
    gc.disable()
    for stage in stages:
        for module in stage:
            with suppress(Exception):  # the role that needs the module reports the error
                importlib.import_module(module)
            # A request has arrived, or the supervisor has exited.
            while select.select([control], [], [], 0)[0]:
                request = _answer(control)
                if request is not None:
                    return request
        control.sendall(IMPORTED)
    while True:
        request = _answer(control)
        if request is not None:
            return request


def _answer(control: socket.socket) -> RoleStart | None:
    """Wait for a request, and fork its role; return the request in the role, else None."""
    header, descriptors, _, _ = socket.recv_fds(
        control, HEADER.size, NUM_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
    )
    size = HEADER.unpack(header)[0] if len(header) == HEADER.size else 0
    body = control.recv(size, socket.MSG_WAITALL) if size else b""
    if not body or len(body) < size:  # the supervisor has exited
        os._exit(0)
    line, folder, *streams = descriptors
    request = RoleStart(**json.loads(body), line=line, folder=folder, streams=streams)
    answer = FORKED if can_fork() else REFUSED
    if answer == FORKED:
        gc.freeze()  # else the first collection in a role copies all pages
        try:
            intermediate = os.fork()
        except OSError:
            answer = REFUSED
        else:
            if not intermediate:
                control.close()  # else its supervisor would not see the death of this process
                _become_role(request)
                return request
            os.waitpid(intermediate, 0)  # after this, the role is a child of the supervisor
    for descriptor in descriptors:
        os.close(descriptor)
    control.sendall(answer)
    return None


def can_fork() -> bool:
    """Return whether this process has one thread and no connection to a GPU."""
    torch: Any = sys.modules.get("torch")
    has_cuda = torch is not None and torch.cuda.is_initialized()
    paths = list[str]()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    has_device = any(path.startswith("/dev/nvidia") for path in paths)
    num_threads = len(os.listdir("/proc/self/task"))
    return num_threads == 1 and not (has_cuda or has_device)


def _become_role(request: RoleStart) -> None:
    """Fork the role, in the intermediate process, which exits. Returns only in the role.

    Waits for: the supervisor. Unblocks: the supervisor.
    """
    try:
        os.write(request.line, b"%d\n" % os.getpid())
        if os.fork():
            os._exit(0)
        os.setsid()
        os.write(request.line, b"%d\n" % os.getpid())
        if os.read(request.line, 1) == GO:
            return
    except BaseException:  # noqa: BLE001  (this process must not return to the serving loop)
        pass
    os._exit(1)


def run(request: RoleStart) -> NoReturn:
    """Run the command of a role in this process, as a new interpreter would, and exit."""
    global is_warm
    is_warm = True
    _take_over_descriptors(request)
    _open_streams()
    vars(weakref.finalize)["_registry"].clear()  # those of the warm parent: it is not ending
    threads = os.environ.get(THREADS)
    os.environ.clear()
    os.environ.update(request.environment)
    _reset_libraries(threads)
    gc.enable()
    show_command(request.words, request.environment)
    sys.orig_argv[:] = request.words
    try:
        _run_command(request.words)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        _exit(end.code or 0)
    _exit(0)


def _take_over_descriptors(request: RoleStart) -> None:
    """Enter the role's folder, and use its standard streams."""
    os.fchdir(request.folder)
    for number, descriptor in enumerate(request.streams):
        os.dup2(descriptor, number)
    for descriptor in (request.line, request.folder, *request.streams):
        os.close(descriptor)


def _run_command(words: Sequence[str]) -> None:
    """Run the module or the file of a command line."""
    kind, *arguments = words[1:]
    if kind == "-m":
        sys.argv[:] = arguments
        _replace_first_path(os.getcwd())
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = [kind, *arguments]
        _replace_first_path(os.path.dirname(os.path.realpath(kind)))
        runpy.run_path(kind, run_name="__main__")


def _exit(code: int) -> NoReturn:
    """Exit as an interpreter does, but free no objects: that would copy the pages of all modules.

    Threads have ended, exit handlers have run, and the buffers of open files are written.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError) as error:
            code = FLUSH_FAILED
            with suppress(OSError, ValueError):
                message = f"{type(error).__name__}: {error}"
                sys.stderr.write(f"Exception ignored in: {stream!r}\n{message}\n")
    for file in [*_frozen_files, *_files()]:
        with suppress(OSError, ValueError):  # closed files raise
            file.flush()
    os._exit(code & 0xFF)


def _files() -> list[io.IOBase]:
    """Return the file objects that the garbage collector knows: not those that are frozen."""
    return [file for file in gc.get_objects() if issubclass(type(file), io.IOBase)]


def freeze() -> None:
    """Keep all objects out of garbage collections, but remember the files among them."""
    if is_warm:  # else the interpreter closes them
        _frozen_files.update(_files())
    gc.freeze()


def show_command(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Set the command line and the environment that /proc shows of this process, as for `ps`."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    # The fields of `man proc_pid_stat` that come after the name of the command, from number 3.
    stat_fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    code_data_heap = [int(stat_fields[number - 3]) for number in (26, 27, 45, 46, 47)]
    stack = int(stat_fields[28 - 3])
    addresses: list[int] = []
    variables = [f"{name}={setting}" for name, setting in environment.items()]
    for strings in (words, variables):
        buffer = ctypes.create_string_buffer(os.fsencode("\0".join(strings)))
        # /proc shows this memory until the process is gone.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(buffer))
        begin = ctypes.addressof(buffer)
        addresses += [begin, begin + len(buffer)]
    areas = MEMORY_MAP.pack(*code_data_heap, libc.sbrk(0), stack, *addresses, 0, 0, -1)
    if libc.prctl(PR_SET_MM, PR_SET_MM_MAP, areas, len(areas), 0):
        raise OSError(ctypes.get_errno(), "the command line cannot be set")


def _open_streams() -> None:
    """Open the standard streams again: those of the warm parent took /dev/null for seekable."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        before: Any = getattr(sys, name)
        buffering = 0 if number and before.write_through else -1
        mode = "wb" if number else "rb"
        buffer: Any = open(number, mode, buffering, closefd=False)  # noqa: SIM115
        getattr(buffer, "raw", buffer).name = f"<{name}>"
        is_line_buffered = number == 2 or (number == 1 and os.isatty(1))
        stream: Any = io.TextIOWrapper(
            buffer,
            encoding=before.encoding,
            errors=before.errors,
            newline="\n" if number else None,
            line_buffering=is_line_buffered and not before.write_through,
            write_through=before.write_through,
        )
        stream.mode = before.mode
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _replace_first_path(folder: str) -> None:
    """Set the folder that an interpreter puts before the paths of its modules."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _reset_libraries(threads: str | None) -> None:
    """Apply the role's numbers of threads, and seed numpy again.

    Args:
        threads: The value of THREADS during the imports.
    """
    modules: dict[str, Any] = dict(sys.modules)
    if "numpy.random" in modules:
        modules["numpy.random"].seed()
    count = os.environ.get(THREADS)
    if "torch" in modules and count != threads and count and count.isdecimal():
        modules["torch"].set_num_threads(int(count))
    if "numpy" in modules:
        _set_blas_threads(os.environ.get(BLAS_THREADS) or count or "")


def _set_blas_threads(count: str) -> None:
    """Set the number of threads of the OpenBLAS that numpy brings; "": the number of CPUs."""
    number = int(count) if count.isdecimal() else len(os.sched_getaffinity(0))
    if number <= 1:
        return
    maps = Path("/proc/self/maps").read_text()
    for path in {*re.findall(r"/\S*libscipy_openblas64_\S*", maps)}:
        with suppress(OSError, AttributeError):  # another build of numpy
            ctypes.CDLL(path).scipy_openblas_set_num_threads64_(number)


if __name__ == "__main__":
    # `serve-llm`, in a role, raises the class Forked of this module, not of `__main__`.
    importlib.import_module("arealite.ext.warm_start.parent").main()
