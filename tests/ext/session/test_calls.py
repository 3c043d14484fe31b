"""The futures of a session, without a model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from arealite.ext.session.calls import Call, Calls


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


async def test_engine_call_runs_also_if_the_task_that_waits_for_it_is_cancelled(
    gate: threading.Event,
) -> None:
    calls = Calls()
    ran = list[str]()
    calls.submit(gate.wait)
    adding: Call[None] = Call(calls.submit(ran.append, "gradient"), calls)
    waiting = asyncio.ensure_future(adding)  # type: ignore[arg-type]
    await asyncio.sleep(0)  # the task begins to wait
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.set()
    await Call(calls.submit(ran.append, "update"), calls)
    assert ran == ["gradient", "update"], "an update lacks no part of its gradient"
    calls.close(cancel=False)


async def test_failed_call_drops_the_gradient_of_the_calls_before_it() -> None:
    gradient = list[str]()
    calls = Calls(on_failure=lambda _: gradient.clear())

    def fail() -> None:
        raise ValueError("a row lacks a field")

    calls.submit(gradient.append, "first half")
    failing = Call(calls.submit(fail), calls)
    skipped = Call(calls.submit(gradient.append, "second half"), calls)
    with pytest.raises(ValueError, match="lacks a field"):
        await failing
    with pytest.raises(ValueError, match="lacks a field"):
        await skipped
    assert not gradient
    await Call(calls.submit(gradient.append, "a new one"), calls)
    assert gradient == ["a new one"]
    calls.close(cancel=False)


async def test_failure_of_a_call_stays_if_a_wait_for_it_shows_the_failure_of_another(
    gate: threading.Event,
) -> None:
    calls = Calls()
    calls.submit(gate.wait)

    def fail() -> None:
        raise ValueError("its own")

    own = Call(calls.submit(fail), calls)
    calls.add_failure(KeyError("another's"))
    with pytest.raises(KeyError, match="another's"):
        await own
    gate.set()
    calls.close(cancel=False)
    with pytest.raises(ValueError, match="its own"):
        calls.check()


async def test_wait_for_a_call_that_has_failed_marks_the_failure_as_seen_at_once() -> None:
    calls = Calls()
    ended = threading.Event()

    def fail() -> None:
        raise ValueError("its own")

    future = calls.submit(fail)
    future.add_done_callback(lambda _: ended.set())
    ended.wait(60.0)
    failed = Call(future, calls)
    waiting = asyncio.ensure_future(failed)  # type: ignore[arg-type]
    await asyncio.sleep(0)  # the task begins to wait
    calls.check()  # as the next call of another task does
    with pytest.raises(ValueError, match="its own"):
        await waiting
    calls.close(cancel=False)


async def test_failure_skips_calls_of_its_adapters_and_no_others() -> None:
    dropped = list[str]()
    ran = list[str]()
    calls = Calls(on_failure=dropped.extend)

    def fail() -> None:
        raise ValueError("of alice and bob")

    failing = Call(calls.submit(fail, adapters=["alice", "bob"]), calls, adapters=["alice", "bob"])
    skipped = calls.submit(ran.append, "bob", adapters=["bob"])
    mixed = calls.submit(ran.append, "bob and carol", adapters=["bob", "carol"])
    carol = calls.submit(ran.append, "carol", adapters=["carol"])
    dave = calls.submit(ran.append, "dave", adapters=["dave"])
    await asyncio.wrap_future(dave)
    calls.check(["carol", "dave"])
    with pytest.raises(ValueError, match="of alice and bob"):
        await failing
    for future in (skipped, mixed, carol):
        with pytest.raises(ValueError, match="of alice and bob"):
            future.result(60.0)
    assert ran == ["dave"], "carol would have been updated with half of a gradient"
    assert set(dropped) == {"alice", "bob", "carol"}
    for name in ("alice", "bob", "carol"):
        await Call(calls.submit(ran.append, name, adapters=[name]), calls, adapters=[name])
    assert ran == ["dave", "alice", "bob", "carol"]
    calls.close(cancel=False)
