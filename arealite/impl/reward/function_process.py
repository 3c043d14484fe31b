"""The process that calls reward functions. `process_pool.py` runs this module.

Functions that are not async are called in the main thread, one after the other, in the order of
their messages. The event loop does not run during a call, so a function may use signals, as
math-verify's time limits do, and `asyncio.run`. Coroutines run in this event loop, in the same
thread, between the calls.

A message is its length, in 4 bytes, and msgpack. The first one is `Start`, then `Call`s follow.
"""

import asyncio
import inspect
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Iterator
from pathlib import Path
from traceback import extract_tb
from typing import Any, SupportsFloat

import msgspec

from arealite.base import outputs
from arealite.base.errors import EpisodeError, RewardTimeout, UserError
from arealite.base.printable import guard_output
from arealite.base.registry import import_function, import_user_module
from arealite.impl.reward.checker import die_with_parent

OPTION = "reward.function.paths"
READY = 0
"""`Answer.id` of the answer to `Start`."""
CANCEL = -1
"""`Call.function` of a message that cancels the call with this id."""
RECEIVED = 1 << 18


class Start(msgspec.Struct):
    """The state of the worker that the process needs to import the same functions."""

    paths: list[str]
    batched: list[bool]
    """For each function: whether it has TRL's form, and so returns a list."""
    sys_path: list[str]
    imports: list[str]
    logging: dict[str, str]
    """Arguments of `log.setup`; {} if the worker has not called it."""
    timeout_s: float
    """Limit for a coroutine. The worker enforces the same limit for other calls."""
    output_log: str
    """The worker's file for the text of closed outputs; "" without one."""


class Call(msgspec.Struct, array_like=True):
    """A call of a function, or CANCEL."""

    id: int
    function: int
    """Index in `Start.paths`."""
    arguments: dict[str, Any]


class Answer(msgspec.Struct, array_like=True):
    """The answer to a call."""

    id: int
    value: float | None = None
    parts: dict[str, float] = {}
    error: str = ""
    """Why there is no value; "" if the call succeeded."""
    error_type: str = ""
    failure_class: str = ""
    """Name and class of an EpisodeError that the function raised; "": another exception."""
    is_awaited: bool = False
    """The function returned a coroutine, which now runs. Another answer has its value."""


decode_start = msgspec.msgpack.Decoder(Start).decode
decode_call = msgspec.msgpack.Decoder(Call).decode
_encode = msgspec.msgpack.Encoder(enc_hook=lambda value: value.tolist()).encode


def framed(message: Start | Call | Answer) -> bytes:
    """Return the bytes of a message. Arrays of numpy become lists."""
    content = _encode(message)
    return len(content).to_bytes(4, "little") + content


class Frames:
    """Splits received bytes into messages."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the messages that are complete with `data`."""
        received = self._received
        begin = 0
        received += data
        while (content := begin + 4) <= len(received):
            end = content + int.from_bytes(received[begin:content], "little")
            if end > len(received):
                break
            yield bytes(received[content:end])
            begin = end
        del received[:begin]


class Functions:
    """The imported functions, and their calls."""

    def __init__(self, calls: socket.socket, answers: socket.socket) -> None:
        self.start: Start
        self.functions: list[Any] = []
        self._incoming = calls
        self._outgoing = answers
        self._frames = Frames()
        self._loop = asyncio.new_event_loop()
        self._running: dict[int, asyncio.Task[None]] = {}

    def serve(self) -> None:
        """Answer messages until the worker closes the connection."""
        self._loop.add_reader(self._incoming, self._loop.stop)
        while True:
            if self._running:
                self._loop.run_forever()  # until a message arrives
            data = self._incoming.recv(RECEIVED)
            if not data:
                return
            for frame in self._frames.feed(data):
                self._handle(frame)

    def _handle(self, frame: bytes) -> None:
        if not self.functions:
            self._send(self._import(decode_start(frame)))
            return
        call = decode_call(frame)
        if call.function != CANCEL:
            self._call(call)
        elif task := self._running.get(call.id):
            task.cancel()

    def _import(self, start: Start) -> Answer:
        self.start = start
        if start.output_log:
            outputs.log_to(Path(start.output_log))
        sys.path[:] = start.sys_path
        try:
            for module in start.imports:
                import_user_module(module, f"imports=[{module}]")
            self.functions = [import_function(path, f"{OPTION}={path}") for path in start.paths]
        except UserError as error:
            return Answer(READY, error=str(error))
        if start.logging and "structlog" in sys.modules:  # its import takes 0.2 s
            from arealite.base import log

            log.setup(**start.logging)
        guard_output()  # an imported module can have replaced the streams
        return Answer(READY)

    def _call(self, call: Call) -> None:
        """Call a function; make a task of the coroutine that it returns."""
        try:
            value = self.functions[call.function](**call.arguments)
            if not inspect.isawaitable(value):
                self._send(self._answer(call, value))
                return
        except BaseException as error:  # noqa: BLE001  (no exception ends the process)
            self._send(self._failed(call, error))
            return
        self._send(Answer(call.id, is_awaited=True))
        self._running[call.id] = self._loop.create_task(self._finish(call, value))

    async def _finish(self, call: Call, value: Awaitable[object]) -> None:
        limit_s = self.start.timeout_s
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                answer = self._answer(call, await value)
        except BaseException as raised:  # noqa: BLE001  (no exception ends the process)
            late = RewardTimeout(too_long(self._name(call), limit_s))
            answer = self._failed(call, late if limit.expired() else raised)
        del self._running[call.id]
        self._send(answer)

    def _answer(self, call: Call, value: Any) -> Answer:
        """Return the number in the result of a function."""
        value = value.tolist() if hasattr(value, "tolist") else value  # numpy and torch
        is_batched = self.start.batched[call.function]
        match value if is_batched else [value]:
            case [None]:
                return Answer(call.id)
            case [SupportsFloat() as number]:
                parts: dict[str, float] = getattr(number, "parts", {})
                parts = {name: float(part) for name, part in parts.items()}
                return Answer(call.id, float(number), parts)
        wanted = "a list with one number per completion" if is_batched else "a number or None"
        error = f"{self._name(call)} returned {value!r:.60}, and must return {wanted}"
        return Answer(call.id, error=sendable(error))

    def _failed(self, call: Call, error: BaseException) -> Answer:
        """Return the answer for a call that raised an exception."""
        if isinstance(error, EpisodeError):
            kind = type(error).__name__
            text = sendable(str(error))
            return Answer(call.id, error=text, error_type=kind, failure_class=error.failure_class)
        frame = extract_tb(error.__traceback__)[-1]
        what = f"raised {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        return Answer(call.id, error=sendable(f"{self._name(call)} {what}"))

    def _name(self, call: Call) -> str:
        return f"reward function {self.start.paths[call.function]}"

    def _send(self, answer: Answer) -> None:
        self._outgoing.sendall(framed(answer))


def too_long(what: str, limit_s: float) -> str:
    """Return the error of a call that has exceeded the limit."""
    limit = f"reward.function.timeout_s={limit_s:g}"
    return f"{what} has not returned after {limit} s. Raise the limit, or shorten the call."


def sendable(text: str) -> str:
    """Return a text with "?" for each character that UTF-8 cannot encode."""
    return text.encode(errors="replace").decode()


def main() -> None:
    """Serve the connections whose file descriptors are the first arguments: calls and answers.

    The third argument is the process id of the worker. The worker's signals to stop do not end this
    process: the worker closes the connection. Handlers, unlike SIG_IGN, are not inherited by the
    programs that a function starts.
    """
    die_with_parent(int(sys.argv[3]))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, lambda _number, _frame: None)
    stdout: Any = sys.stdout
    stdout.reconfigure(line_buffering=True)  # a process that is killed loses no lines
    outputs.protect()  # a function may print although the worker's output is closed
    descriptors = [int(word) for word in sys.argv[1:3]]
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    calls, answers = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    Functions(calls, answers).serve()


if __name__ == "__main__":
    main()
