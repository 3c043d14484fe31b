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

from arealite.impl.env.code.values import decode, encode

ENDED = "ended"


class Line:
    """Sends and receives JSON values, one per line, through two pipes."""

    def __init__(self, read: int, write: int) -> None:
        self.read = read
        self.write = write
        self.rest = b""

    def send(self, message: object) -> None:
        """Send one value."""
        text = json.dumps(message).encode() + b"\n"
        while text:
            text = text[os.write(self.write, text) :]

    def fill(self) -> None:
        """Read available bytes; exit if the other process has ended."""
        piece = os.read(self.read, 1 << 16)
        if not piece:
            os._exit(0)
        self.rest += piece

    def receive(self) -> Any:
        """Wait for one value."""
        while b"\n" not in self.rest:
            self.fill()
        text, _, self.rest = self.rest.partition(b"\n")
        return json.loads(text)


OPERATIONS: dict[str, Callable[..., object]] = {
    "call": lambda function, args, options: function(*args, **options),
    "get": getattr, "set": setattr, "list": list, "len": len, "item": operator.getitem,
    "str": str, "eq": operator.eq, "isinstance": lambda kind, value: isinstance(value, kind),
}  # fmt: skip


def wait_and_fork(job: dict[str, Any], line: Line, out: int) -> None:
    """Fork a process for the program at each "start"; send its process id and its exit code."""
    while True:
        if line.receive() != "start":
            continue  # a request to a program that has ended
        pid = os.fork()
        if pid == 0:
            run_program(job, line, out)
        line.send({"pid": pid})
        line.send({ENDED: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])})


def run_program(job: dict[str, Any], line: Line, out: int) -> None:
    """Run the program. With a stdin, run it to its end; without, serve requests to its functions.

    Args:
        job: Source, entry point and visible names.
        line: Pipes to the harness; the first message is the stdin or None.
        out: File descriptor that becomes stdout if there is a stdin.
    """
    stdin = line.receive()
    if stdin is not None:
        os.dup2(out, 1)
        feed(stdin.encode(errors="replace"))
    os.close(out)
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    names = module.__dict__
    code = 0
    try:
        compiled = compile(job["source"], "<program>", "exec")
        if stdin is None:
            exec(compiled, names)
            if job["entry"]:
                names[job["entry"]]
    except BaseException as error:  # noqa: BLE001  (the harness gets any error)
        line.send({"error": describe(error)})
        os._exit(1)
    if stdin is not None:
        line.send({"loaded": {}})
        try:
            exec(compiled, names)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:  # noqa: BLE001
            code = 1
        sys.stdout.flush()
        os._exit(code & 255)
    visible = {name: names[name] for name in job["names"] if name in names}
    serve({n: v for n, v in visible.items() if not isinstance(v, type(sys))}, line)


def serve(visible: dict[str, object], line: Line) -> None:
    """Answer the tests' requests about the program's visible values."""
    kept: list[object] = []

    def keep(value: object) -> int:
        kept.append(value)
        return len(kept) - 1

    line.send({"loaded": {name: encode(value, keep) for name, value in visible.items()}})
    while True:
        operation, *parts = line.receive()
        try:
            parts = [decode(part, kept.__getitem__) for part in parts]
            answer = {"value": encode(OPERATIONS[operation](*parts), keep)}
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


def feed(text: bytes) -> None:
    """Make `text` this process's stdin."""
    read, write = os.pipe()
    if len(text) > 1 << 16 and os.fork() == 0:
        os.close(read)
        while text:
            text = text[os.write(write, text) :]
        os._exit(0)
    elif len(text) <= 1 << 16:
        os.write(write, text)
    os.close(write)
    os.dup2(read, 0)
    os.close(read)
