"""Runs an event loop in a thread of its own, beside the trainer's thread."""

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress

from arealite.system.health.vitals import watch


class LoopThread:
    """A daemon thread that runs one coroutine in an event loop."""

    def __init__(self, name: str, main: Callable[[], Coroutine[object, object, None]]) -> None:
        self.loop = asyncio.new_event_loop()
        self.ended: Future[None] = Future()
        """Resolves when the coroutine has ended, with the coroutine's error if it failed."""
        # A new thread has an empty context; the role in log lines is part of the context.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run,
            args=(self._run, main),
            name=name,
            daemon=True,
        )
        self._thread.start()

    def stop(self, stop: Callable[[], None], seconds: float) -> None:
        """Call `stop` in the loop, then wait until the thread exits, at most `seconds`."""
        with suppress(RuntimeError):  # the loop is closed already
            self.loop.call_soon_threadsafe(stop)
        self._thread.join(seconds)

    def _run(self, main: Callable[[], Coroutine[object, object, None]]) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                watch(self.loop)
                runner.run(main())
        except BaseException as error:  # noqa: BLE001  (is raised in the trainer's thread)
            if isinstance(error, BaseExceptionGroup):
                first, *_ = error.exceptions
                self.ended.set_exception(first)
            else:
                self.ended.set_exception(error)
        else:
            self.ended.set_result(None)
