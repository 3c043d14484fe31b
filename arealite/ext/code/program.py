"""The process of the program under test: run the program and answer the harness's requests.

This process is forked before the tests are read, and all its files except two pipes are closed. So
the program knows no expected values, and its only output is its functions' results as plain data.
"""

from __future__ import annotations  # `compile` hands it on to the programs

import json
import operator
import os
import sys
from collections.abc import Callable
from typing import Any

from arealite.ext.code.json_values import decode, encode

ENDED = "ended"
PIPE_BYTES = 1 << 16
"""Capacity of a pipe, and the size of the largest read."""


class JsonPipes:
    """Sends and receives JSON values, one per line, through two pipes."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd = read_fd
        self.write_fd = write_fd
        self.unread = b""

    def send(self, message: object) -> None:
        """Send one value."""
        write_all(self.write_fd, json.dumps(message).encode() + b"\n")

    def fill(self) -> None:
        """Read available bytes; exit if the other process has ended."""
        chunk = os.read(self.read_fd, PIPE_BYTES)
        if not chunk:
            os._exit(0)
        self.unread += chunk

    def receive(self) -> Any:
        """Wait for one value."""
        while b"\n" not in self.unread:
            self.fill()
        message, _, self.unread = self.unread.partition(b"\n")
        return json.loads(message)


def write_all(write_fd: int, octets: bytes) -> None:
    """Write all bytes to a file descriptor."""
    while octets:
        num_written = os.write(write_fd, octets)
        octets = octets[num_written:]


OPERATIONS: dict[str, Callable[..., object]] = {
    "call": lambda function, args, options: function(*args, **options),
    "get": getattr,
    "set": setattr,
    "list": list,
    "len": len,
    "item": operator.getitem,
    "str": str,
    "eq": operator.eq,
    "isinstance": lambda kind, value: isinstance(value, kind),
}


def wait_and_fork(job: dict[str, Any], line: JsonPipes, output_fd: int) -> None:
    """Fork a process for the program at each "start"; send its process id and its exit code."""
    while True:
        if line.receive() != "start":
            continue  # a request to a program that has ended
        pid = os.fork()
        if pid == 0:
            run_program(job, line, output_fd)
        line.send({"pid": pid})
        _, wait_status = os.waitpid(pid, 0)
        line.send({ENDED: os.waitstatus_to_exitcode(wait_status)})


def run_program(job: dict[str, Any], line: JsonPipes, output_fd: int) -> None:
    """Run the program. With a stdin, run it to its end; without, serve requests to its functions.

    Args:
        job: Source, entry point and visible names.
        line: Pipes to the harness; the first message is the stdin or None.
        output_fd: File descriptor that becomes stdout if there is a stdin.
    """
    stdin = line.receive()
    if stdin is not None:
        os.dup2(output_fd, 1)
        feed(stdin.encode(errors="replace"))
    os.close(output_fd)
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    names = module.__dict__
    entry = job["entry"]
    try:
        compiled = compile(job["source"], "<program>", "exec")
        if stdin is None:
            exec(compiled, names)
            if entry:
                names[entry]
    except BaseException as error:  # noqa: BLE001  (the harness gets any error)
        line.send({"error": describe(error)})
        os._exit(1)
    if stdin is not None:
        line.send({"loaded": {}})
        code = 0
        try:
            exec(compiled, names)
        except SystemExit as error:
            code = exit_code(error)
        except BaseException:  # noqa: BLE001
            code = 1
        sys.stdout.flush()
        os._exit(code & 255)
    visible = {
        name: names[name]
        for name in job["names"]
        if name in names and not isinstance(names[name], type(sys))
    }
    serve(visible, line)


def exit_code(error: SystemExit) -> int:
    """Return the exit code of Python after a SystemExit, before it is reduced to 8 bits."""
    if isinstance(error.code, int):
        return error.code
    return int(error.code is not None)


def serve(visible: dict[str, object], line: JsonPipes) -> None:
    """Answer the tests' requests about the program's visible values."""
    kept: list[object] = []

    def keep(value: object) -> int:
        kept.append(value)
        return len(kept) - 1

    loaded = {name: encode(value, keep) for name, value in visible.items()}
    line.send({"loaded": loaded})
    while True:
        operation, *encoded_arguments = line.receive()
        try:
            arguments = [decode(argument, kept.__getitem__) for argument in encoded_arguments]
            answer = {"value": encode(OPERATIONS[operation](*arguments), keep)}
            json.dumps(answer)
        except BaseException as error:  # noqa: BLE001
            answer = {"error": describe(error)}
        line.send(answer)


def describe(error: BaseException) -> list[str]:
    """Return an error's class name and text."""
    try:
        return [type(error).__name__, str(error)[:500]]
    except BaseException:  # noqa: BLE001  (the error's __str__ raised)
        return ["Exception", ""]


def feed(stdin: bytes) -> None:
    """Make these bytes this process's stdin. A fork writes bytes that a pipe cannot hold."""
    read_fd, write_fd = os.pipe()
    fits_into_pipe = len(stdin) <= PIPE_BYTES
    if fits_into_pipe:
        os.write(write_fd, stdin)
    elif os.fork() == 0:
        os.close(read_fd)
        write_all(write_fd, stdin)
        os._exit(0)
    os.close(write_fd)
    os.dup2(read_fd, 0)
    os.close(read_fd)
