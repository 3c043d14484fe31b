"""Starts of roles from a warm parent: the side of the supervisor.

A role that a warm parent forked needs no imports, is a child of the supervisor, and differs in
nothing else from a role that the supervisor started. Without a warm parent, and if it dies, the
supervisor starts the role itself; the next start finds a new warm parent.
"""

import asyncio
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from arealite.base import exit_record, log
from arealite.ext.warm_start import parent
from arealite.ext.warm_start.parent import FORKED, GO, HEADER, IMPORTED, REFUSED
from arealite.impl.launcher.processes import PARENT, Child, spawn

SWITCH = "AREALITE_WARM_PARENT"
"""Environment variable; "0": every role imports its modules itself."""
PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37
PR_SET_MM_MAP_SIZE = 15
IMPORT_S = 300.0
"""Longest time for the imports of a role."""
ANSWER_S = 30.0
"""Longest time for an answer of a warm parent, which may be in an import, or stopped."""
END_S = 10.0
"""Longest time for the exit of a role that was given up before it began."""

logger = log.get(__name__)


def start_process(
    stages: Sequence[Sequence[str]], environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a warm parent; return its process and the connection to it.

    Args:
        stages: The modules to import, in this order.
        environment: Variables in addition to those of this process.

    Raises:
        OSError: The system has no place for a process.
    """
    control, theirs = socket.socketpair()
    command = [
        sys.executable,
        "-m",
        parent.__name__,
        str(theirs.fileno()),
        json.dumps(stages),
    ]
    variables = {parent.BLAS_THREADS: "1", PARENT: str(os.getpid())}
    try:
        with theirs:
            process = subprocess.Popen(
                command,
                env=os.environ | environment | variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
    except OSError:
        control.close()
        raise
    return process, control


class ForkedParent:
    """The process of a warm parent that this process forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        _, wait_status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(wait_status)


class ForkedRole:
    """The process of a role, with the interface of asyncio's processes."""

    def __init__(self, pid: int) -> None:
        """Watch a process.

        Raises:
            OSError: The process is no child of this one.
        """
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        self.pid = pid
        self.returncode: int | None = None
        self._loop = asyncio.get_running_loop()
        self._exit_code: asyncio.Future[int] = self._loop.create_future()
        self._descriptor = os.pidfd_open(pid)
        self._loop.add_reader(self._descriptor, self._reap)

    def _reap(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        _, wait_status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(wait_status)
        self._exit_code.set_result(self.returncode)

    async def wait(self) -> int:
        """Return the exit code, once the process has exited."""
        return await asyncio.shield(self._exit_code)


class WarmParent:
    """Starts, uses and restarts the warm parent of this supervisor."""

    def __init__(self, stages: Sequence[Sequence[str]], environment: Mapping[str, str]) -> None:
        """Start nothing yet.

        Args:
            stages: The modules to import, in this order.
            environment: Variables during the imports, in addition to those of this process.
        """
        self.stages = stages
        self.environment = environment
        self.process: subprocess.Popen[bytes] | ForkedParent | None = None
        """None: it has exited; the next start of a role makes a new one."""
        self._control: socket.socket
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop that reads the answers of the process; None: nothing reads them yet."""
        self.num_imported = 0
        """Lower bound of the number of imported stages."""
        self._changed = asyncio.Event()
        """Set for a moment when a stage is imported, and when the process has exited."""
        self._answer: asyncio.Future[bytes] | None = None
        self._forking = asyncio.Lock()
        self._is_refused = False
        """Whether a process refused to fork, as the next one would."""
        self._is_successor = False
        """Whether an earlier process died. Then no role waits until its modules are imported."""

    def start(self) -> None:
        """Start the process. If the system cannot, `process` stays None."""
        self.num_imported = 0
        with suppress(OSError):
            self.process, self._control = start_process(self.stages, self.environment)

    def fork_here(self) -> None:
        """Fork the process from this one, which is a role of another warm parent.

        Raises:
            Forked: See warm_parent.fork_warm_parent.
        """
        self._control, theirs = socket.socketpair()
        with theirs:
            self.process = ForkedParent(parent.fork_warm_parent(theirs, self._control))
        self.num_imported = sys.maxsize

    def close(self) -> None:
        """Kill the process. Its roles continue."""
        process = self.process
        self.process = None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._control)
        self._loop = None
        self._control.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(b"")
        self._wake()

    async def start_role(
        self, name: str, words: Sequence[str], log: Path | None, env: Mapping[str, str], stage: int
    ) -> Child:
        """Start a role, as `processes.spawn` does.

        Args:
            name: Name of the role.
            words: Command line.
            log: See `processes.spawn`.
            env: Variables of the role in addition to those of this process.
            stage: Number of the last stage whose modules the role needs.
        """
        if can_start(words):
            with suppress(OSError), log.open("ab") if log else nullcontext() as output:
                begin = output.tell() if output else 0
                streams = [output.fileno()] * 2 if output else [1, 2]
                record = exit_record.new_file(log)
                record_variable = {exit_record.VARIABLE: str(record or "")}
                role = await self.fork(words, {**env, **record_variable}, stage, streams)
                if role is not None:
                    return Child(
                        name=name,
                        process=role,
                        log=log,
                        log_begin=begin,
                        record=record,
                    )
        return await spawn(name, words, log=log, environment=env)

    async def fork(
        self, words: Sequence[str], env: Mapping[str, str], stage: int, streams: Sequence[int]
    ) -> ForkedRole | None:
        """Fork a role, once its modules are imported; see `start_role`.

        Waits for: the warm parent, at most IMPORT_S and ANSWER_S. Unblocks: the warm parent.

        Args:
            words: Command line.
            env: Variables of the role in addition to those of this process.
            stage: Number of the last stage whose modules the role needs.
            streams: File descriptors of stdout and stderr.

        Returns:
            None if no warm parent could fork.
        """
        if self._is_refused:
            return None
        process = self.process
        if process is None:
            self._restart()
            return None
        self._read_answers()
        if self._is_successor and self.num_imported < len(self.stages):
            return None
        with suppress(TimeoutError):
            async with asyncio.timeout(IMPORT_S):
                while self.num_imported <= stage and self.process is process:
                    await self._changed.wait()
        async with self._forking:
            if self.process is not process:
                if self.process is None:
                    self._restart()
                return None
            environment = os.environ | env | {PARENT: str(os.getpid())}
            request = {"words": [*words], "environment": environment}
            return await self._fork(json.dumps(request).encode(), streams)

    async def _fork(self, body: bytes, streams: Sequence[int]) -> ForkedRole | None:
        """Send a request, and return its role; after a failure, no part of the role remains."""
        line, theirs = socket.socketpair()
        received = bytearray()
        with line, subreaper():
            line.setblocking(False)
            try:
                async with asyncio.timeout(ANSWER_S):
                    with theirs:
                        await self._request(body, [theirs.fileno()], streams)
                    role = await self._adopt(line, received)
                if role is None:
                    self._is_refused = True
                    logger.warning("the warm parent cannot fork, or has threads, or uses a GPU")
                    self.close()
                return role
            except OSError as error:
                logger.warning("no warm start", error=str(error) or "no answer in time")
                self._give_up(line, received)
                self._restart()
                return None
            except BaseException:
                self._give_up(line, received)
                raise

    async def _request(self, body: bytes, line: Sequence[int], streams: Sequence[int]) -> None:
        """Send a request with its file descriptors."""
        loop = asyncio.get_running_loop()
        self._answer = loop.create_future()
        folder = os.open(".", os.O_PATH)
        null = os.open(os.devnull, os.O_RDONLY)
        try:
            descriptors = [*line, folder, null, *streams]
            socket.send_fds(self._control, [HEADER.pack(len(body))], descriptors)
        finally:
            os.close(folder)
            os.close(null)
        await loop.sock_sendall(self._control, body)

    async def _adopt(self, line: socket.socket, received: bytearray) -> ForkedRole | None:
        """Wait for a forked role, and let it begin.

        Args:
            line: The connection to the role.
            received: Gets the process ids that the role and the process in between send.

        Returns:
            None if the warm parent refused.

        Raises:
            OSError: The warm parent or the role has exited.
        """
        assert self._answer is not None
        answer = await self._answer
        if answer == REFUSED:
            return None
        if answer != FORKED:
            raise OSError("the warm parent has exited")
        while received.count(b"\n") < 2:
            chunk = await asyncio.get_running_loop().sock_recv(line, 64)
            if not chunk:
                raise OSError("the role exited before it began")
            received += chunk
        _, role_pid = received.split()
        role = ForkedRole(int(role_pid))
        with suppress(OSError):  # the role has exited; role.wait returns its code
            line.send(GO)
        return role

    def _give_up(self, line: socket.socket, received: bytearray) -> None:
        """Kill the warm parent, and wait for the exit of the role that it may have forked."""
        self.close()
        with suppress(OSError):
            line.settimeout(END_S)
            line.shutdown(socket.SHUT_WR)  # the role exits
            while chunk := line.recv(64):
                received += chunk
        for pid in received.split():
            with suppress(ChildProcessError):
                os.waitpid(int(pid), 0)

    def _restart(self) -> None:
        self._is_successor = True
        self.start()
        if self.process is not None:
            self._read_answers()

    def _read_answers(self) -> None:
        """Read the answers of the process in this event loop from now on."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._control.setblocking(False)
            self._loop.add_reader(self._control, self._on_answer)

    def _on_answer(self) -> None:
        answers = b""
        with suppress(OSError):
            answers = self._control.recv(64)
        if not answers:
            self.close()
            return
        self.num_imported += answers.count(IMPORTED)
        self._wake()
        outcome = answers.replace(IMPORTED, b"")
        if outcome and self._answer is not None and not self._answer.done():
            self._answer.set_result(outcome)

    def _wake(self) -> None:
        self._changed.set()
        self._changed.clear()


@contextmanager
def subreaper() -> Generator[None]:
    """Make this process the parent of descendants whose parent exits, during the body."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, before.value)


def is_possible() -> bool:
    """Return whether this system can have a warm parent, and the user has not switched it off."""
    if os.environ.get(SWITCH) == "0" or sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    prctl = ctypes.CDLL(None).prctl
    number = ctypes.byref(ctypes.c_int())
    has_subreapers = prctl(PR_GET_CHILD_SUBREAPER, number) == 0
    if not has_subreapers:
        return False
    # Whether the kernel lets a process set its command line.
    return prctl(parent.PR_SET_MM, PR_SET_MM_MAP_SIZE, number, 0, 0) == 0


def can_start(words: Sequence[str]) -> bool:
    """Return whether a warm parent can run a command: a module or a file with this interpreter."""
    if words[0] != sys.executable:
        return False
    is_module_or_file = words[1] == "-m" or words[1].endswith(".py")
    return is_module_or_file and is_possible()


def fork_here() -> WarmParent | None:
    """Fork a warm parent from this process, if this is a role of a warm parent that has torch.

    Raises:
        Forked: See warm_parent.fork_warm_parent.
    """
    is_ready = parent.is_warm and "torch" in sys.modules
    if not (is_ready and parent.can_fork() and is_possible()):
        return None
    warm = WarmParent([], {})
    with suppress(OSError):
        warm.fork_here()
    return warm if warm.process else None
