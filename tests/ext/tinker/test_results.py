"""Requests that are sent again, arrive in another order, fail, or are too many."""

import asyncio

import pytest

from arealite.base.errors import UserError
from arealite.ext.tinker import results as results_module
from arealite.ext.tinker.results import (
    FutureResult,
    OrderedRequests,
    PendingRequest,
    Results,
    Unavailable,
)


def answering(log: list[str], name: str) -> results_module.RequestJob:
    """Return a job that notes that it ran."""

    async def job() -> FutureResult:
        log.append(name)
        return FutureResult.of(name)

    return job


def begin(results: Results, request_id: str) -> PendingRequest:
    pending = results.begin(request_id, request_id.encode())
    assert pending is not None
    return pending


async def test_request_that_is_sent_again_runs_once() -> None:
    results = Results(max_pending=10)
    log: list[str] = []

    for _ in range(2):
        pending = results.begin("a", b"body")
        if pending is not None:
            results.start(pending, answering(log, "a"))

    assert (await results.wait("a")).body == (await results.wait("a")).body == b'"a"'
    assert log == ["a"]
    with pytest.raises(UserError, match="request a was sent before with another body"):
        results.begin("a", b"other")


async def test_requests_of_a_model_run_in_the_order_of_their_numbers() -> None:
    results = Results(max_pending=10)
    turns = OrderedRequests(results)
    log: list[str] = []

    for number in (3, 1, 2):
        turns.add(number, begin(results, str(number)), answering(log, str(number)))
    for number in (1, 2, 3):
        await results.wait(str(number))

    assert log == ["1", "2", "3"]
    turns.add(2, begin(results, "again"), answering(log, "again"))
    assert b"the next request of this model is 4" in (await results.wait("again")).body
    await turns.close("ended")


async def test_requests_that_wait_for_their_turn_fail_at_the_end() -> None:
    results = Results(max_pending=10)
    turns = OrderedRequests(results)
    started = asyncio.Event()

    async def never() -> FutureResult:
        started.set()
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    turns.add(1, begin(results, "1"), never)
    turns.add(3, begin(results, "3"), answering([], "3"))
    await started.wait()
    await turns.close("the model was unloaded")

    assert b"cancelled" in (await results.wait("1")).body
    assert b"the model was unloaded" in (await results.wait("3")).body


@pytest.mark.parametrize(
    ("error", "body"),
    [
        (UserError("wrong"), b'{"error":"wrong","category":"user"}'),
        (ZeroDivisionError("oops"), b'{"error":"ZeroDivisionError: oops","category":"server"}'),
    ],
)
async def test_failure_is_a_result_with_its_cause(error: Exception, body: bytes) -> None:
    results = Results(max_pending=10)

    async def fail() -> FutureResult:
        raise error

    results.start(begin(results, "a"), fail)
    assert (await results.wait("a")).body == body


async def test_unfinished_requests_are_limited() -> None:
    results = Results(max_pending=2)
    begin(results, "a")
    pending = begin(results, "b")

    with pytest.raises(Unavailable) as refused:
        results.begin("c", b"")
    assert refused.value.status == 429
    results.start(pending, answering([], "b"))
    await results.wait("b")
    begin(results, "c")


async def test_waiting_ends_before_the_result_and_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(results_module, "WAIT_S", 0.01)
    results = Results(max_pending=2)
    pending = begin(results, "a")

    with pytest.raises(Unavailable) as refused:
        await results.wait("a")
    assert refused.value.status == 408
    results.start(pending, answering([], "a"))
    assert (await results.wait("a")).body == b'"a"'


async def test_oldest_results_are_dropped_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_module, "MAX_BYTES", results_module.OVERHEAD + 10)
    results = Results(max_pending=10)
    open_request = begin(results, "open")
    for name in ("first", "second"):
        results.start(begin(results, name), answering([], name))
        await results.wait(name)

    with pytest.raises(Unavailable) as refused:
        await results.wait("first")
    assert refused.value.status == 410
    assert (await results.wait("second")).body == b'"second"'
    results.start(open_request, answering([], "x"))
    await results.wait("open")


async def test_request_that_never_arrives_fails_those_that_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(results_module, "GAP_S", 0.01)
    results = Results(max_pending=10)
    turns = OrderedRequests(results)
    log: list[str] = []
    for number in (2, 4):
        turns.add(number, begin(results, str(number)), answering(log, str(number)))

    for number in (2, 4):
        body = (await results.wait(str(number))).body
        assert b"the request with seq_id=1 has not arrived" in body
    turns.add(5, begin(results, "5"), answering(log, "5"))
    assert (await results.wait("5")).body == b'"5"'
    assert log == ["5"]
    await turns.close("ended")


async def test_request_that_is_cancelled_before_it_begins_ends() -> None:
    results = Results(max_pending=1)
    results.start(begin(results, "a"), answering([], "a"))
    results.cancel("a")

    assert b"cancelled" in (await results.wait("a")).body
    begin(results, "b")


async def test_bodies_of_unfinished_requests_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_module, "MAX_PENDING_BYTES", 10)
    results = Results(max_pending=10)
    first = results.begin("a", bytes(20))
    assert first is not None

    with pytest.raises(Unavailable) as refused:
        results.begin("b", bytes(1))
    assert refused.value.status == 429
    results.start(first, answering([], "a"))
    await results.wait("a")
    begin(results, "b")


async def test_cancelled_request_ends_and_says_so() -> None:
    results = Results(max_pending=10)
    was_cancelled = asyncio.Event()

    async def sample() -> FutureResult:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            was_cancelled.set()
        raise AssertionError

    results.start(begin(results, "a"), sample)
    await asyncio.sleep(0)
    results.cancel("a")
    results.cancel("unknown")

    assert b"cancelled" in (await results.wait("a")).body
    assert was_cancelled.is_set()
