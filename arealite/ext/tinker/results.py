"""The results of a tenant's requests, until the client has read them.

A client sends a request, gets its id, and asks for the result until it is there. It may send both
again if it did not get an answer: the same request runs once.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256

import msgspec

from arealite.base import log
from arealite.base.errors import EpisodeError, UserError, one_line

logger = log.get(__name__)

MAX_BYTES = 2**28
"""Bytes of results that a tenant keeps; the oldest are dropped."""
OVERHEAD = 2048
"""Bytes of a kept result besides its body."""
MAX_PENDING_BYTES = 2**28
"""Bytes of the bodies of a tenant's unfinished requests."""
GAP_S = 60.0
"""Requests wait so long for an earlier one of their model that has not arrived."""
WAIT_S = 20.0
"""A request for a result is answered after this time at the latest."""
PROTOBUF = "application/x-protobuf"
JSON = "application/json"


class Unavailable(Exception):
    """A request cannot be answered; `status` tells the client whether to try again."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class FutureResult:
    """The body of an answer."""

    body: bytes
    content_type: str = JSON

    @classmethod
    def of(cls, fields: object) -> "FutureResult":
        """Return a result in JSON."""
        return cls(body=msgspec.json.encode(fields))


RequestJob = Callable[[], Awaitable[FutureResult]]


@dataclass(eq=False)
class PendingRequest:
    """A request, and its result once it is there."""

    request_id: str
    digest: bytes
    num_bytes: int
    """Length of the request's body."""
    result: asyncio.Future[FutureResult] = field(default_factory=asyncio.Future[FutureResult])
    task: asyncio.Task[None] | None = None


class Results:
    """The requests of one tenant, by their ids."""

    def __init__(self, *, max_pending: int) -> None:
        self._max_pending = max_pending
        self._requests = dict[str, PendingRequest]()
        self._finished = deque[str]()
        """Ids of the requests that have a result, oldest first."""
        self._num_pending = 0
        self._num_pending_bytes = 0
        self._num_bytes = 0

    def begin(self, request_id: str, body: bytes) -> PendingRequest | None:
        """Note a request; return None if the client has sent it before.

        Raises:
            UserError: The client has sent another request of this id.
            Unavailable: The tenant has too many unfinished requests.
        """
        digest = sha256(body).digest()
        earlier = self._requests.get(request_id)
        if earlier is not None:
            if earlier.digest != digest:
                raise UserError(f"request {request_id} was sent before with another body.")
            return None
        is_large = self._num_pending_bytes + len(body) > MAX_PENDING_BYTES
        if self._num_pending and (is_large or self._num_pending >= self._max_pending):
            raise Unavailable(429, f"you have {self._num_pending} unfinished requests. Wait.")
        self._num_pending += 1
        self._num_pending_bytes += len(body)
        pending = PendingRequest(request_id, digest, len(body))
        self._requests[request_id] = pending
        return pending

    async def run(self, pending: PendingRequest, job: RequestJob) -> None:
        """Run a job, and keep its result or the reason of its failure."""
        try:
            result = await job()
        except asyncio.CancelledError:
            self._end(pending, _failed("the request was cancelled", "user"))
            raise
        except (UserError, EpisodeError) as error:
            result = _failed(one_line(error), "user")
        except Exception as error:
            logger.exception("request failed")
            result = _failed(f"{type(error).__name__}: {one_line(error)}", "server")
        self._end(pending, result)

    def _end(self, pending: PendingRequest, result: FutureResult) -> None:
        """Keep a result, unless there is one already."""
        if pending.result.done():
            return
        pending.result.set_result(result)
        pending.task = None
        self._num_pending -= 1
        self._num_pending_bytes -= pending.num_bytes
        self._num_bytes += len(result.body) + OVERHEAD
        self._finished.append(pending.request_id)
        while self._num_bytes > MAX_BYTES and len(self._finished) > 1:
            oldest = self._requests.pop(self._finished.popleft())
            self._num_bytes -= len(oldest.result.result().body) + OVERHEAD

    def submit(self, request_id: str, body: bytes, job: RequestJob) -> None:
        """Run a job in a task, unless the client has sent its request before; see `begin`."""
        pending = self.begin(request_id, body)
        if pending is not None:
            self.start(pending, job)

    def start(self, pending: PendingRequest, job: RequestJob) -> None:
        """Run a job in a task, which `cancel` can cancel."""
        task = asyncio.create_task(self.run(pending, job))
        pending.task = task
        cancelled = _failed("the request was cancelled", "user")
        task.add_done_callback(lambda _: self._end(pending, cancelled))  # before it has begun

    def cancel(self, request_id: str) -> None:
        """Cancel a request that runs in a task of its own, if it has not ended."""
        pending = self._requests.get(request_id)
        if pending is not None and pending.task is not None:
            pending.task.cancel()

    async def wait(self, request_id: str) -> FutureResult:
        """Return a result.

        Raises:
            Unavailable: It is not there yet (408), or no longer (410).
        """
        pending = self._requests.get(request_id)
        if pending is None:
            raise Unavailable(410, f"there is no result of request {request_id}, or no longer.")
        try:
            return await asyncio.wait_for(asyncio.shield(pending.result), WAIT_S)
        except TimeoutError:
            raise Unavailable(408, "the request has not ended yet.") from None


def _failed(error: str, category: str) -> FutureResult:
    return FutureResult.of({"error": error, "category": category})


class OrderedRequests:
    """Runs the requests of one model in the order of their numbers, which begin at 1.

    Requests may arrive in another order.
    """

    def __init__(self, results: Results) -> None:
        self._results = results
        self._next = 1
        self._waiting = dict[int, tuple[PendingRequest, RequestJob]]()
        self._has_next = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def add(self, number: int, pending: PendingRequest, job: RequestJob) -> None:
        """Add a request. It fails if a request of this number was added before."""
        if number < self._next or number in self._waiting:
            reason = f"seq_id={number}: the next request of this model is {self._next}."
            self._results.start(pending, partial(_refuse, reason))
            return
        self._waiting[number] = (pending, job)
        self._has_next.set()

    async def _run(self) -> None:
        while True:
            timeout_s = GAP_S if self._waiting else None
            try:
                await asyncio.wait_for(self._has_next.wait(), timeout_s)
            except TimeoutError:
                await self._skip_gap()
            self._has_next.clear()
            while self._next in self._waiting:
                pending, job = self._waiting.pop(self._next)
                self._next += 1
                await self._results.run(pending, job)

    async def _skip_gap(self) -> None:
        """Refuse the requests that wait for one that has not arrived; later ones run."""
        missing = self._next
        self._next = max(self._waiting) + 1
        await self._refuse_waiting(f"the request with seq_id={missing} has not arrived.")

    async def close(self, reason: str) -> None:
        """End; requests that wait for their turn fail."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._refuse_waiting(reason)

    async def _refuse_waiting(self, reason: str) -> None:
        refused = [*self._waiting.values()]
        self._waiting.clear()
        for pending, _ in refused:
            await self._results.run(pending, partial(_refuse, reason))


async def _refuse(reason: str) -> FutureResult:
    raise UserError(reason)
