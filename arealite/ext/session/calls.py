"""Futures of a session's calls, and the thread that runs its engine calls in order."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import RLock
from typing import Any, Generic, TypeVar

from arealite.base.errors import UserError

T = TypeVar("T")
Input = TypeVar("Input")
DEFAULT = ("",)
"""The adapters of a call that names none."""


class AdapterRemoved(UserError):
    """The user has removed the adapter of a call. Only that call raises it."""


class Call(Generic[T]):
    """The result of a call, once it is there: `await` it, or call `result` in a plain script."""

    def __init__(
        self,
        future: Future[T],
        calls: "Calls",
        *,
        adapters: Collection[str] = DEFAULT,
        is_cancelled_with_its_wait: bool = False,
    ) -> None:
        self._future = future
        self._is_cancelled_with_its_wait = is_cancelled_with_its_wait
        self._calls = calls
        self._adapters = adapters
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
        """Note that this wait will show the user the call's failure, also one of the past.

        Raises:
            BaseException: Another call has failed, and nobody waited for it.
        """
        with self._calls.lock:
            self._is_awaited = True
            own_error = self._error()
            if own_error is not None:
                self._calls.mark_seen(own_error)
        if self._future.done():
            return
        try:
            self._calls.check(self._adapters)
        except BaseException as error:
            self._end_wait(error)
            raise

    def _end_wait(self, error: BaseException) -> None:
        """Note that the user has seen a failure, and that nobody waits now."""
        self._calls.mark_seen(error)
        with self._calls.lock:
            self._is_awaited = False
            own_error = self._error()
            if own_error is not None and own_error is not error:  # the wait was given up
                self._calls.add_failure(own_error, self._adapters)

    def _on_end(self, future: Future[T]) -> None:
        with self._calls.lock:
            error = self._error()
            if error is not None and not self._is_awaited:
                self._calls.add_failure(error, self._adapters)

    def _error(self) -> BaseException | None:
        """Return the failure of the call; None if it has not ended, or has none."""
        if not self._future.done() or self._future.cancelled():
            return None
        return self._future.exception()


async def results_ahead(
    begin: Callable[[Input], Call[T]],
    inputs: Iterable[Input],
    num_ahead: int,
) -> AsyncIterator[T]:
    """Yield the result of the call that `begin` makes of each input, in their order.

    Args:
        begin: Begins a call.
        inputs: An input is read when its call begins.
        num_ahead: Number of further calls that run meanwhile. They are cancelled at the end.
    """
    unread = iter(inputs)
    begun = deque[Call[T]]()
    try:
        while True:
            for call_input in unread:
                begun.append(begin(call_input))
                if len(begun) > num_ahead:
                    break
            if not begun:
                return
            yield await begun.popleft()
    finally:
        for call in begun:
            call.cancel()


@dataclass(eq=False, kw_only=True)
class _Failure:
    """The failure of an engine call."""

    error: BaseException
    end_of_skipped: float = math.inf
    """Number of the first engine call that was made after the user had seen it."""


class Calls:
    """Runs engine calls in their order, and keeps each failure until the user has seen it.

    After a failed engine call, the calls for its adapters that were made before the user saw the
    failure do not run: they fail with the same error. An update with half of a gradient is
    therefore never applied. Calls for other adapters run.
    """

    def __init__(
        self,
        on_failure: Callable[[Collection[str]], None] = lambda adapters: None,
    ) -> None:
        """Start no thread yet.

        Args:
            on_failure: Called in the engine's thread with the adapters of a failed engine call.
        """
        self._on_failure = on_failure
        self._engine_thread = ThreadPoolExecutor(1, "session engine")
        self._unseen: list[tuple[BaseException, Collection[str]]] = []
        """Failures of calls that nobody waited for, oldest first, and the calls' adapters."""
        self.lock = RLock()
        """Is held while failures are noted, or while it changes whether they are."""
        self._num_submitted = 0
        self._failures = dict[str, _Failure]()
        """Failure of the newest engine call for each adapter; none if it succeeded."""

    def submit(
        self,
        job: Callable[..., T],
        *args: object,
        adapters: Collection[str] = DEFAULT,
    ) -> Future[T]:
        """Run `job(*args)` in the engine's thread, after all earlier jobs.

        Args:
            job: The function.
            args: Its arguments.
            adapters: If a call for one of them has failed, the job may be skipped.
        """
        number = self._num_submitted
        self._num_submitted += 1
        return self._engine_thread.submit(self._run, number, adapters, job, *args)

    def check(self, adapters: Collection[str] | None = None) -> None:
        """Raise the oldest failure that the user has not seen, of some adapters; None: of any."""
        for error, of_adapters in self._unseen:
            if adapters is None or not {*adapters}.isdisjoint(of_adapters):
                self.mark_seen(error)
                raise error

    def mark_seen(self, error: BaseException) -> None:
        """Note that the user has seen a failure: later engine calls run."""
        with self.lock:
            self._unseen = [unseen for unseen in self._unseen if unseen[0] is not error]
            for failure in self._failures.values():
                if failure.error is error and failure.end_of_skipped == math.inf:
                    failure.end_of_skipped = self._num_submitted

    def add_failure(self, error: BaseException, adapters: Collection[str] = DEFAULT) -> None:
        """Keep a failure of a call that nobody waits for."""
        if isinstance(error, AdapterRemoved):
            return
        with self.lock:
            is_seen = any(
                failure.error is error and failure.end_of_skipped < math.inf
                for failure in self._failures.values()
            )
            if not is_seen and all(error is not unseen for unseen, _ in self._unseen):
                self._unseen.append((error, adapters))

    def close(self, *, cancel: bool) -> None:
        """End the thread after its jobs.

        Args:
            cancel: Cancel the jobs that have not begun.
        """
        self._engine_thread.shutdown(cancel_futures=cancel)

    def _run(
        self,
        number: int,
        adapters: Collection[str],
        job: Callable[..., T],
        *args: object,
    ) -> T:
        with self.lock:
            failures = [self._failures.pop(name) for name in adapters if name in self._failures]
        for failure in failures:
            if number < failure.end_of_skipped:
                self._fail(adapters, failure)
                raise failure.error
        try:
            return job(*args)
        except BaseException as error:
            self._fail(adapters, _Failure(error=error))
            raise

    def _fail(self, adapters: Collection[str], failure: _Failure) -> None:
        """Skip the next calls for all adapters of a failed call: it may have had rows of each."""
        with self.lock:
            self._failures |= dict.fromkeys(adapters, failure)
        self._on_failure(adapters)
