"""Futures of a session's calls, and the thread that runs its engine calls in order."""

import asyncio
import math
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Call(Generic[T]):
    """The result of a call, once it is there: `await` it, or call `result` in a plain script."""

    def __init__(
        self,
        future: Future[T],
        calls: "Calls",
        *,
        is_cancelled_with_its_wait: bool = False,
    ) -> None:
        self._future = future
        self._is_cancelled_with_its_wait = is_cancelled_with_its_wait
        self._calls = calls
        self._is_awaited = False
        future.add_done_callback(self._on_end)

    def __await__(self) -> Generator[Any, None, T]:
        self._begin_wait()
        try:
            ended = asyncio.wrap_future(self._future)
            if not self._is_cancelled_with_its_wait:
                ended = asyncio.shield(ended)
            return (yield from ended.__await__())
        except BaseException as error:
            self._end_wait(error)
            raise

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the result in this thread.

        Args:
            timeout_s: Longest wait in seconds; None: without a limit.

        Raises:
            TimeoutError: The call has not ended in that time.
        """
        self._begin_wait()
        try:
            return self._future.result(timeout_s)
        except BaseException as error:
            self._end_wait(error)
            raise

    def done(self) -> bool:
        """Return whether the call has ended."""
        return self._future.done()

    def cancel(self) -> bool:
        """Cancel a call that samples or that has not begun; return whether it was cancelled."""
        return self._future.cancel()

    def _begin_wait(self) -> None:
        if not self._future.done():
            self._calls.check()
        self._is_awaited = True

    def _end_wait(self, error: BaseException) -> None:
        """Note that the user has seen a failure, and that nobody waits now."""
        self._calls.mark_seen(error)
        self._is_awaited = False
        if not self._future.done() or self._future.cancelled():
            return
        own_error = self._future.exception()
        if own_error is not None and own_error is not error:  # the wait was given up
            self._calls.add_failure(own_error)

    def _on_end(self, future: Future[T]) -> None:
        if self._is_awaited or future.cancelled():
            return
        error = future.exception()
        if error is not None:
            self._calls.add_failure(error)


class Calls:
    """Runs engine calls in their order, and keeps each failure until the user has seen it.

    After a failed engine call, the calls that were made before the user saw the failure do not run:
    they fail with the same error. An update with half of a gradient is therefore never applied.
    """

    def __init__(self, on_failure: Callable[[], None] = lambda: None) -> None:
        """Start no thread yet.

        Args:
            on_failure: Called in the engine's thread after a failed engine call.
        """
        self._on_failure = on_failure
        self._engine_thread = ThreadPoolExecutor(1, "session engine")
        self._unseen: list[BaseException] = []
        """Failures of calls that nobody waited for, oldest first."""
        self._lock = Lock()
        self._num_submitted = 0
        self._failure: BaseException | None = None
        """Failure of the newest engine call that ran; None if it succeeded."""
        self._end_of_skipped = math.inf
        """Number of the first engine call that was made after the user had seen `_failure`."""

    def submit(self, job: Callable[..., T], *args: object) -> Future[T]:
        """Run `job(*args)` in the engine's thread, after all earlier jobs."""
        number = self._num_submitted
        self._num_submitted += 1
        return self._engine_thread.submit(self._run, number, job, *args)

    def check(self) -> None:
        """Raise the oldest failure that the user has not seen."""
        if self._unseen:
            error = self._unseen[0]
            self.mark_seen(error)
            raise error

    def mark_seen(self, error: BaseException) -> None:
        """Note that the user has seen a failure: later engine calls run."""
        with self._lock:
            self._unseen = [failure for failure in self._unseen if failure is not error]
        if error is self._failure and self._end_of_skipped == math.inf:
            self._end_of_skipped = self._num_submitted

    def add_failure(self, error: BaseException) -> None:
        """Keep a failure of a call that nobody waits for."""
        is_seen = error is self._failure and self._end_of_skipped < math.inf
        with self._lock:
            if not is_seen and error not in self._unseen:
                self._unseen.append(error)

    def close(self, *, cancel: bool) -> None:
        """End the thread after its jobs.

        Args:
            cancel: Cancel the jobs that have not begun.
        """
        self._engine_thread.shutdown(cancel_futures=cancel)

    def _run(self, number: int, job: Callable[..., T], *args: object) -> T:
        if self._failure is not None and number < self._end_of_skipped:
            raise self._failure
        self._failure = None
        try:
            return job(*args)
        except BaseException as error:
            self._end_of_skipped = math.inf
            self._failure = error
            self._on_failure()
            raise
