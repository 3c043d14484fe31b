"""Plays episodes with a function of the user, outside the event loop of the worker.

A function that is not async runs in a thread. All coroutines run in one event loop in a thread of
its own, so they can share clients. The gateway is in the worker's event loop: a coroutine that
blocks holds up other coroutines, but gets its answers.
"""

import asyncio
import inspect
from collections.abc import Awaitable
from contextlib import AsyncExitStack, suppress
from traceback import extract_tb

from arealite.api.rollout_messages import root_error
from arealite.api.task import Task
from arealite.base.errors import EpisodeError, UserError
from arealite.ext.adapters.blocking import Threads, start
from arealite.ext.gateway.session import Endpoint
from arealite.ext.harness.programs import AT, HarnessFailed
from arealite.ext.rewards.user_functions import import_function

THREADS = 256
"""Concurrent calls of a function that is not async, in one worker."""


class HarnessFunction:
    """Calls the function of `env.harness.run`."""

    def __init__(self, path: str) -> None:
        """Import the function.

        Raises:
            UserError: There is no such function, it does not accept (task, endpoint), or it yields.
        """
        self.path = path
        option = f"{AT}run={path}"
        function = import_function(path, option)
        self._function = function
        self._threads = Threads(THREADS)
        try:
            inspect.signature(function).bind("task", "endpoint")
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{option} cannot be called: {error}. Write def solve(task, endpoint)."
            ) from error
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise UserError(f"{option} is a generator. Return the reward, do not yield it.")

    def setup(self, cleanup: AsyncExitStack) -> None:
        """Start the event loop of coroutines. Its cleanup cancels them."""
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._closed = asyncio.Event()
        cleanup.callback(self._loop.call_soon_threadsafe, self._closed.set)
        start(self._run_loop)

    def _run_loop(self) -> None:
        with self._runner:
            while not self._closed.is_set():
                with suppress(SystemExit, KeyboardInterrupt):  # of a task
                    self._runner.run(self._closed.wait())

    async def run(self, task: Task, endpoint: Endpoint) -> object:
        """Return the result of the function.

        Raises:
            HarnessFailed: The function raised an exception. The message names its line.
        """
        try:
            result = await self._threads.call(self._function, task, endpoint)
            if not inspect.isawaitable(result):
                return result
            running = asyncio.run_coroutine_threadsafe(finish(result), self._loop)
            return await asyncio.wrap_future(running)
        except (Exception, SystemExit) as raised:
            error = root_error(raised)
            if isinstance(error, EpisodeError | UserError):
                raise error from raised
            description = f"{type(error).__name__}: {error}"
            raise HarnessFailed(
                f"{self.path} raised {description:.250}{self._line_of(error)}"
            ) from raised

    def _line_of(self, error: BaseException) -> str:
        """Return " (file:line)" of the function's last frame, or of the last frame; "": none."""
        frames = extract_tb(error.__traceback__)
        if not frames:
            return ""
        function_file = inspect.getsourcefile(inspect.unwrap(self._function))
        last_frame = frames[-1]
        for frame in frames:
            if frame.filename == function_file:
                last_frame = frame
        return f" ({last_frame.filename}:{last_frame.lineno})"


async def finish(result: Awaitable[object]) -> object:
    """Return the value of an awaitable, which may be no coroutine."""
    return await result
