"""Calls reward functions in processes, each of which makes one call at a time.

All calls wait in one queue. A process gets the next call when it has answered; while its calls are
short, it gets several at once. Coroutines run concurrently, in the process that began them.

A call that takes too long or is cancelled ends its process, and so does a call that crashes it. All
other calls of this process go back to the queue, and the next call starts another process.
"""

import asyncio
import itertools
import os
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec

from arealite.base import log, outputs, registry
from arealite.base.errors import DeadlineError, EpisodeError, RewardTimeout, UserError
from arealite.ext.rewards import function_process as wire
from arealite.ext.rewards.config import FunctionRewardConfig
from arealite.ext.rewards.function_process import (
    Frames,
    FunctionAnswer,
    FunctionCall,
    FunctionImports,
    framed,
)
from arealite.impl.launcher.processes import Child, end_all, how_ended, spawn
from arealite.system.health.waits import Wait

START_S = 300.0
"""Limit for the start of a process, which imports the functions: a module may load a model."""
SHORT_S = 0.002
"""Calls of less time are short."""
MOST_SENT = 64
"""Calls that a process gets at once if its newest call was short; otherwise it gets one."""
TRIES = 3
"""Attempts of a coroutine whose process is ended by other calls."""
CLOSE_S = 5.0
"""Time for an idle process to exit before it is killed."""
DRAIN_S = 1.0
"""Time for reading the last answers of a process that has exited. Another process, which a function
started, can hold the connection open."""

NAME = "reward process"
COMMAND = (sys.executable, "-m", wire.__name__)
logger = log.get(__name__)
_decode = msgspec.msgpack.Decoder(FunctionAnswer).decode


class FunctionFailed(EpisodeError, failure_class="reward_function"):
    """A reward function raised an exception or returned no number. There is no reward."""


class FunctionCrash(EpisodeError, failure_class="reward_crash"):
    """A reward function ended its process. There is no reward."""


@dataclass(slots=True, eq=False, kw_only=True)
class PendingCall:
    """A call without an answer."""

    number: int
    function_name: str
    """The name of the function in errors, as in "reward function module:name"."""
    message: bytes
    answer: asyncio.Future[FunctionAnswer]
    process: "FunctionProcess | None" = None
    """The process that got the call; None: the call is in the queue."""
    begin: float = 0.0
    """Time at which the process began the call."""
    interrupted: int = 0
    """Number of times that another call ended the process of the coroutine."""

    def fail(self, error: Exception) -> None:
        """Raise an error in the caller, unless it has stopped waiting."""
        if not self.answer.done():
            self.answer.set_exception(error)


class FunctionProcess(asyncio.Protocol):
    """One process, from its start to its end."""

    def __init__(self, pool: "ProcessPool") -> None:
        self.running: asyncio.Task[None] | None = None
        """Runs as long as the process; None: it is not started."""
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_ready = False
        self._pool = pool
        self._child: Child | None = None
        self._calls_transport: Any = None
        self._transport: Any = None
        """Receives answers. A failed write to a process that has ended would close it and lose the
        last answers, so calls have a connection of their own."""
        self._frames = Frames()
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_killed = False
        self._last_call_s = SHORT_S
        self._timer: asyncio.TimerHandle | None = None
        self._calls: dict[int, PendingCall] = {}
        """In the order of their messages: the process makes the first one."""
        self._coroutines: dict[int, PendingCall] = {}

    @property
    def has_room(self) -> bool:
        """Whether the process can get another call."""
        most = MOST_SENT if self._last_call_s < SHORT_S else 1
        return self.is_ready and len(self._calls) < most

    async def run(self) -> None:
        """Start the process, wait until it has exited, and return its open calls to the pool."""
        start_error = None
        try:
            await self._start()
            await self._closed
        except (UserError, DeadlineError) as error:
            start_error = error
            if not self.started.done():
                self.started.set_exception(error)
            self.started.exception()  # the next line logs it, if no caller waits for the start
            logger.warning("reward process failed to start", error=str(error))
        finally:
            self.is_ready = False
            if self._timer is not None:
                self._timer.cancel()
            self._close_transports()
            if self._child is not None:
                is_busy = self._calls or self._coroutines
                await end_all([self._child], 0, grace_s=0.0 if is_busy else CLOSE_S)
            self._pool.replace(self, self._give_back(), start_error)

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        calls, calls_of_child = socket.socketpair()
        answers, answers_of_child = socket.socketpair()
        with (
            calls_of_child,
            answers_of_child,
            Wait(event="its start", owner="reward pool", on=NAME, seconds=START_S),
        ):
            self._calls_transport, _ = await loop.create_unix_connection(
                asyncio.Protocol, sock=calls
            )
            await loop.create_unix_connection(lambda: self, sock=answers)
            calls_fd = calls_of_child.fileno()
            answers_fd = answers_of_child.fileno()
            self._child = await spawn(
                NAME,
                [*COMMAND, str(calls_fd), str(answers_fd), str(os.getpid())],
                log=None,
                environment={},
                pass_fds=(calls_fd, answers_fd),
            )
            calls_of_child.close()
            answers_of_child.close()
            exited = asyncio.ensure_future(self._child.process.wait())
            exited.add_done_callback(lambda _: loop.call_later(DRAIN_S, self._transport.abort))
            self._calls_transport.write(framed(self._pool.start_message()))
            await asyncio.wait((self.started, self._closed), return_when="FIRST_COMPLETED")
            if not self.started.done():
                how = how_ended(await exited)
                raise UserError(
                    f"{wire.OPTION}={self._pool.paths}: "
                    f"the process that imports them ended ({how}). "
                    "Its output is in the log."
                )
        self.started.result()
        self.is_ready = True
        self._pool.dispatch()

    def close(self) -> None:
        """Make `run` end."""
        if self._transport is not None:
            self._close_transports()
        elif self.running is not None:
            self.running.cancel()

    def _close_transports(self) -> None:
        for transport in (self._calls_transport, self._transport):
            if transport is not None:
                transport.close()

    def send(self, call: PendingCall) -> None:
        """Send a call to the process."""
        call.process = self
        call.begin = time.monotonic()
        self._calls[call.number] = call
        self._calls_transport.write(call.message)
        if self._timer is None:
            self._set_timer(self._pool.limit_s)

    def cancel(self, call: PendingCall) -> None:
        """End a call: kill the process if it makes this call."""
        if call.number in self._coroutines:
            self._calls_transport.write(
                framed(FunctionCall(id=call.number, function=wire.CANCEL, arguments={}))
            )
        elif call is self._first:
            self._kill()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """End `run`."""
        if not self._closed.done():  # it is cancelled when the event loop ends first
            self._closed.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Give the answers to their callers, and get the next calls."""
        for frame in self._frames.feed(data):
            answer = _decode(frame)
            if answer.id != wire.READY:
                self._receive(answer)
            elif answer.error:
                self.started.set_exception(UserError(answer.error))
            else:
                self.started.set_result(None)
        self._pool.dispatch()

    def _receive(self, answer: FunctionAnswer) -> None:
        if answer.id in self._calls:
            call = self._calls.pop(answer.id)
        else:
            call = self._coroutines.pop(answer.id)
        now = time.monotonic()
        self._last_call_s = now - call.begin
        if self._first is not None:
            self._first.begin = now
        if answer.is_awaited:
            self._coroutines[call.number] = call
        elif not call.answer.done():
            call.answer.set_result(answer)

    @property
    def _first(self) -> PendingCall | None:
        """The call that the process makes; None: it makes none."""
        return next(iter(self._calls.values()), None)

    def _set_timer(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._check_limit)

    def _check_limit(self) -> None:
        """Fail a call that exceeds the limit, and kill the process."""
        self._timer = None
        call = self._first
        if call is None:
            return
        remaining_s = call.begin + self._pool.limit_s - time.monotonic()
        if remaining_s > 0.0:
            self._set_timer(remaining_s)
            return
        call.fail(RewardTimeout(wire.too_long(call.function_name, self._pool.limit_s)))
        self._kill()

    def _kill(self) -> None:
        self._is_killed = True
        self.is_ready = False
        if self._child is not None:
            self._child.kill()

    def _give_back(self) -> list[PendingCall]:
        """Fail the calls that the process made when it crashed; return its other open calls."""
        calls = [*self._calls.values()]
        coroutines = [*self._coroutines.values()]
        if self._child is not None and not self._is_killed:
            how = how_ended(self._child.code)
            for call in calls[:1] or coroutines:
                call.fail(FunctionCrash(f"{call.function_name} ended its process ({how})"))
        for call in coroutines:
            call.interrupted += 1
            if call.interrupted == TRIES:
                name = call.function_name
                crash = FunctionCrash(f"{name}: other calls ended its process {TRIES} times")
                call.fail(crash)
        return [call for call in (*coroutines, *calls) if not call.answer.done()]


class ProcessPool:
    """The processes of one worker, and the queue of their calls."""

    def __init__(self, functions: dict[str, bool], config: FunctionRewardConfig) -> None:
        """Create a pool without processes.

        Args:
            functions: For the path of each function: whether it has TRL's form.
            config: Number of processes, and limit of a call.
        """
        self.paths = [*functions]
        self.limit_s = config.timeout_s
        self._batched = [*functions.values()]
        self._count = config.processes
        self._processes: list[FunctionProcess] = []
        self._queue = deque[PendingCall]()
        self._numbers = itertools.count(wire.READY + 1)
        self._is_closed = False

    async def start(self) -> None:
        """Start all processes.

        Raises:
            UserError: A process cannot import the functions.
            DeadlineError: A process does not end importing them.
        """
        while len(self._processes) < self._count:
            self._start_process()
        await asyncio.gather(*(process.started for process in self._processes))

    async def call(self, path: str, arguments: dict[str, Any]) -> FunctionAnswer:
        """Call a function and return its answer, which has no error.

        Raises:
            EpisodeError: The arguments cannot be sent, the call takes too long, its process ends,
                or the function raised an exception or returned no number.
        """
        function_name = f"reward function {path}"
        number = next(self._numbers)
        try:
            message = framed(
                FunctionCall(id=number, function=self.paths.index(path), arguments=arguments)
            )
        except (AttributeError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise FunctionFailed(
                f"{function_name}: the row cannot be sent ({error}). "
                "A row consists of values of JSON."
            ) from error
        call = PendingCall(
            number=number,
            function_name=function_name,
            message=message,
            answer=asyncio.get_running_loop().create_future(),
        )
        self._queue.append(call)
        self.dispatch()
        try:
            with Wait(event=function_name, owner="reward pool", on=NAME):
                answer = await call.answer
        except asyncio.CancelledError:
            if call.process is not None:
                call.process.cancel(call)
            raise
        if answer.error:
            raise error_of(answer)
        return answer

    def dispatch(self) -> None:
        """Send calls to the processes that have room; start further processes if calls wait."""
        queue = self._queue
        for process in self._processes:
            while queue and process.has_room:
                call = queue.popleft()
                if not call.answer.done():  # the caller was cancelled
                    process.send(call)
        while queue and len(self._processes) < self._count and not self._is_closed:
            self._start_process()

    def replace(
        self, process: FunctionProcess, calls: list[PendingCall], error: Exception | None
    ) -> None:
        """Remove a process that has ended, and queue its open calls again.

        Args:
            process: The process.
            calls: Its open calls.
            error: Why it could not start; fails all calls of the queue.
        """
        self._processes.remove(process)
        self._queue.extendleft(reversed(calls))
        if error is not None or self._is_closed:
            failure_reason = "the worker stops" if error is None else str(error)
            while self._queue:
                self._queue.popleft().fail(FunctionFailed(failure_reason))
        self.dispatch()

    async def close(self) -> None:
        """End all processes. Does not wait for calls."""
        self._is_closed = True
        processes = [*self._processes]
        for process in processes:
            process.close()
        running = [process.running for process in processes if process.running]
        await asyncio.gather(*running, return_exceptions=True)

    def start_message(self) -> FunctionImports:
        """Return the first message of a process."""
        return FunctionImports(
            paths=self.paths,
            batched=self._batched,
            sys_path=sys.path,
            imports=registry.imported,
            logging=log.arguments,
            timeout_s=self.limit_s,
            output_log=str(outputs.ProtectedOutput.log or ""),
        )

    def _start_process(self) -> None:
        process = FunctionProcess(self)
        self._processes.append(process)
        process.running = asyncio.create_task(process.run(), name=NAME)


def error_of(answer: FunctionAnswer) -> EpisodeError:
    """Return the EpisodeError that a function raised; for other exceptions a FunctionFailed."""
    if not answer.failure_class:
        return FunctionFailed(answer.error)
    error_type = type(answer.error_type, (EpisodeError,), {"failure_class": answer.failure_class})
    return error_type(answer.error)
