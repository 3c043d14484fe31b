"""The process that calls reward functions. `process_pool.py` runs this module.

Functions that are not async are called in the main thread, one after the other, in the order of
their messages. The event loop does not run during a call, so a function may use signals, as
math-verify's time limits do, and `asyncio.run`. Coroutines run in this event loop, in the same
thread, between the calls.

A message is its length, in 4 bytes, and msgpack. The first one is `FunctionImports`, then
`FunctionCall`s follow.
"""

import asyncio
import inspect
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Iterator
from contextlib import closing
from pathlib import Path
from traceback import extract_tb
from typing import Any, SupportsFloat

import msgspec

from arealite.base import outputs
from arealite.base.errors import EpisodeError, RewardTimeout, UserError
from arealite.base.printable import guard_output
from arealite.base.registry import import_user_module
from arealite.base.signals import kill_with_parent
from arealite.ext.rewards.user_functions import import_function

OPTION = "reward.function.paths"
READY = 0
"""`FunctionAnswer.id` of the answer to `FunctionImports`."""
CANCEL = -1
"""`FunctionCall.function` of a message that cancels the call with this id."""
LENGTH_BYTES = 4
RECEIVE_BYTES = 1 << 18


class FunctionImports(msgspec.Struct, kw_only=True):
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


class FunctionCall(msgspec.Struct, array_like=True, kw_only=True):
    """A call of a function, or CANCEL."""

    id: int
    function: int
    """Index in `FunctionImports.paths`."""
    arguments: dict[str, Any]


class FunctionAnswer(msgspec.Struct, array_like=True, kw_only=True):
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


decode_start = msgspec.msgpack.Decoder(FunctionImports).decode
decode_call = msgspec.msgpack.Decoder(FunctionCall).decode
_encode = msgspec.msgpack.Encoder(enc_hook=lambda value: value.tolist()).encode


def framed(message: FunctionImports | FunctionCall | FunctionAnswer) -> bytes:
    """Return the bytes of a message. Arrays of numpy become lists."""
    content = _encode(message)
    return len(content).to_bytes(LENGTH_BYTES, "little") + content


class Frames:
    """Splits received bytes into messages."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the messages that are complete with `data`."""
        received = self._received
        received += data
        message_begin = 0
        while True:
            content_begin = message_begin + LENGTH_BYTES
            if content_begin > len(received):
                break
            content_bytes = int.from_bytes(received[message_begin:content_begin], "little")
            content_end = content_begin + content_bytes
            if content_end > len(received):
                break
            yield bytes(received[content_begin:content_end])
            message_begin = content_end
        del received[:message_begin]


class ImportedFunctions:
    """The imported functions, and their calls."""

    def __init__(self, calls: socket.socket, answers: socket.socket) -> None:
        self.start: FunctionImports
        self.functions: list[Any] = []
        self._incoming = calls
        self._outgoing = answers
        self._frames = Frames()
        self._loop = asyncio.new_event_loop()
        self._running: dict[int, asyncio.Task[None]] = {}

    def serve(self) -> None:
        """Answer messages until the worker closes the connection."""
        self._loop.add_reader(self._incoming, self._loop.stop)
        with closing(self._loop):
            while data := self._next_bytes():
                for frame in self._frames.feed(data):
                    self._handle(frame)

    def _next_bytes(self) -> bytes:
        """Run the coroutines until bytes arrive; return them, or b"" at the end."""
        if self._running:
            self._loop.run_forever()
        return self._incoming.recv(RECEIVE_BYTES)

    def _handle(self, frame: bytes) -> None:
        if not self.functions:
            self._send(self._import(decode_start(frame)))
            return
        call = decode_call(frame)
        if call.function != CANCEL:
            self._call(call)
            return
        task = self._running.get(call.id)
        if task is not None:
            task.cancel()

    def _import(self, start: FunctionImports) -> FunctionAnswer:
        self.start = start
        if start.output_log:
            outputs.log_to(Path(start.output_log))
        sys.path[:] = start.sys_path
        try:
            for module in start.imports:
                import_user_module(module, f"imports=[{module}]")
            self.functions = [import_function(path, f"{OPTION}={path}") for path in start.paths]
        except UserError as error:
            return FunctionAnswer(id=READY, error=str(error))
        if start.logging and "structlog" in sys.modules:  # its import takes 0.2 s
            from arealite.base import log

            log.setup(**start.logging)
        guard_output()  # an imported module can have replaced the streams
        return FunctionAnswer(id=READY)

    def _call(self, call: FunctionCall) -> None:
        """Call a function; make a task of the coroutine that it returns."""
        try:
            returned = self.functions[call.function](**call.arguments)
            if not inspect.isawaitable(returned):
                self._send(self._answer(call, returned))
                return
        except BaseException as error:  # noqa: BLE001  (no exception ends the process)
            self._send(self._failed(call, error))
            return
        self._send(FunctionAnswer(id=call.id, is_awaited=True))
        self._running[call.id] = self._loop.create_task(self._finish(call, returned))

    async def _finish(self, call: FunctionCall, coroutine: Awaitable[object]) -> None:
        limit_s = self.start.timeout_s
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                answer = self._answer(call, await coroutine)
        except BaseException as error:  # noqa: BLE001  (no exception ends the process)
            if limit.expired():
                timeout = RewardTimeout(too_long(self._name(call), limit_s))
                answer = self._failed(call, timeout)
            else:
                answer = self._failed(call, error)
        del self._running[call.id]
        self._send(answer)

    def _answer(self, call: FunctionCall, returned: Any) -> FunctionAnswer:
        """Return the number in the result of a function."""
        if hasattr(returned, "tolist"):  # numpy and torch
            returned = returned.tolist()
        is_batched = self.start.batched[call.function]
        match returned if is_batched else [returned]:
            case [None]:
                return FunctionAnswer(id=call.id)
            case [SupportsFloat() as reward]:
                parts: dict[str, float] = getattr(reward, "parts", {})
                parts = {name: float(part) for name, part in parts.items()}
                return FunctionAnswer(id=call.id, value=float(reward), parts=parts)
        expected = "a list with one number per completion" if is_batched else "a number or None"
        error = f"{self._name(call)} returned {returned!r:.60}, and must return {expected}"
        return FunctionAnswer(id=call.id, error=sendable(error))

    def _failed(self, call: FunctionCall, error: BaseException) -> FunctionAnswer:
        """Return the answer for a call that raised an exception."""
        error_type = type(error).__name__
        if isinstance(error, EpisodeError):
            return FunctionAnswer(
                id=call.id,
                error=sendable(str(error)),
                error_type=error_type,
                failure_class=error.failure_class,
            )
        frame = extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename}:{frame.lineno}"
        message = f"{self._name(call)} raised {error_type}: {error} ({place})"
        return FunctionAnswer(id=call.id, error=sendable(message))

    def _name(self, call: FunctionCall) -> str:
        return f"reward function {self.start.paths[call.function]}"

    def _send(self, answer: FunctionAnswer) -> None:
        self._outgoing.sendall(framed(answer))


def too_long(function_name: str, limit_s: float) -> str:
    """Return the error of a call that has exceeded the limit."""
    return (
        f"{function_name} has not returned after reward.function.timeout_s={limit_s:g} s. "
        "Raise the limit, or shorten the call."
    )


def sendable(message: str) -> str:
    """Return a text with "?" for each character that UTF-8 cannot encode."""
    return message.encode(errors="replace").decode()


def main() -> None:
    """Serve the connections whose file descriptors are the first arguments: calls and answers.

    The third argument is the process id of the worker. The worker's signals to stop do not end this
    process: the worker closes the connection. Handlers, unlike SIG_IGN, are not inherited by the
    programs that a function starts.
    """
    if not kill_with_parent(int(sys.argv[3])):
        os._exit(1)
    for stop_signal in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(stop_signal, lambda _signal, _frame: None)
    stdout: Any = sys.stdout
    stdout.reconfigure(line_buffering=True)  # a process that is killed loses no lines
    outputs.protect()  # a function may print although the worker's output is closed
    with inherited_socket(sys.argv[1]) as calls, inherited_socket(sys.argv[2]) as answers:
        ImportedFunctions(calls, answers).serve()


def inherited_socket(descriptor: str) -> socket.socket:
    """Return the socket of a file descriptor that this process inherited; its children do not."""
    os.set_inheritable(int(descriptor), False)
    return socket.socket(fileno=int(descriptor))


if __name__ == "__main__":
    main()
