"""A process that has imported AReaLite, and runs the commands of tutorials in forks.

    python -m tests.docs.fork_server SOCKET

A tutorial has dozens of commands; each would import for up to ten CPU seconds. fork_client.py is
the other side. The server exits when its standard input closes.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from arealite.ext.warm_start import parent
from arealite.ext.warm_start.parent import HEADER, RoleStart
from tests.forks import FIXED, IMPORTS, ROOT
from tests.waiting import until


@cache
def start() -> str:
    """Start the server of this process of pytest, once; return its socket."""
    folder = Path(tempfile.mkdtemp(prefix="forks-"))
    (folder / "home").mkdir()
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.docs.fork_server", str(folder / "socket")],
        cwd=ROOT,
        env=os.environ | FIXED | {parent.BLAS_THREADS: "1", "HOME": str(folder / "home")},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    atexit.register(server.communicate)  # closes its standard input, and waits
    until((folder / "socket").exists, what="the server of forks", seconds=400)
    return str(folder / "socket")


@dataclass
class Command:
    """A running command."""

    client: socket.socket
    pid: int
    pidfd: int
    """Readable after the end of the process."""


def main() -> None:
    """Import, then serve until standard input closes; in a fork, run its command."""
    for module in IMPORTS:
        importlib.import_module(module)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen(64)
        request = serve(listener)
    while request is not None:
        try:
            parent.run(request)
        except parent.Forked as forked:  # a warm parent of the command has forked a role
            request = forked.request


def serve(listener: socket.socket) -> RoleStart | None:
    """Fork commands, and report their ends. Return None at the end, a request in a fork."""
    commands: list[Command] = []
    while True:
        sources = [0, listener, *(c.client for c in commands), *(c.pidfd for c in commands)]
        ready = select.select(sources, [], [])[0]
        if 0 in ready:
            for command in commands:
                os.kill(command.pid, signal.SIGKILL)
            return None
        for command in [c for c in commands if c.client in ready or c.pidfd in ready]:
            if command.client in ready:  # the client was killed
                os.kill(command.pid, signal.SIGKILL)
            reap_and_report(command)
            commands.remove(command)
        if listener in ready and (request := begin(listener, commands)) is not None:
            return request


def begin(listener: socket.socket, commands: list[Command]) -> RoleStart | None:
    """Accept a client, and fork its command; return the request only in the fork."""
    client = listener.accept()[0]
    if (request := receive(client)) is None:
        return None
    if pid := os.fork():
        for descriptor in (request.line, request.folder, *request.streams):
            os.close(descriptor)
        with suppress(OSError):  # the client was killed; the server then kills the fork
            client.sendall(b"%d\n" % pid)
        commands.append(Command(client, pid, os.pidfd_open(pid)))
        return None
    for connection in (listener, client, *(c.client for c in commands)):
        connection.close()
    for command in commands:
        os.close(command.pidfd)
    os.setsid()
    return request


def receive(client: socket.socket) -> RoleStart | None:
    """Return the request of a client; None if the client was killed."""
    header, descriptors, _, _ = socket.recv_fds(client, HEADER.size, 4)
    if len(header) < HEADER.size:
        return None
    size = HEADER.unpack(header)[0]
    body = client.recv(size, socket.MSG_WAITALL)
    folder, *streams = descriptors
    if len(body) < size:
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    line = os.open(os.devnull, os.O_RDONLY)  # the fork has no supervisor
    return RoleStart(**json.loads(body), line=line, folder=folder, streams=streams)


def reap_and_report(command: Command) -> None:
    """Report the end of a command to its client."""
    code = os.waitstatus_to_exitcode(os.waitpid(command.pid, 0)[1])
    os.close(command.pidfd)
    with command.client:
        try:
            command.client.sendall(b"%d\n" % code)
        except OSError:
            return


if __name__ == "__main__":
    main()
