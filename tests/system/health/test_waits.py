"""A wait past its deadline raises an error with its name; a wait in time changes nothing."""

from __future__ import annotations

import asyncio
import time

import pytest

from arealite.base.errors import DeadlineError
from arealite.system.health import waits
from arealite.system.health.waits import Wait


async def test_error_of_a_late_wait_has_its_owner_and_event() -> None:
    begin = time.monotonic()
    wait = Wait(event="an answer of datapipe", owner="rollout-0", seconds=0.01)
    with pytest.raises(DeadlineError) as caught, wait:
        await asyncio.Event().wait()
    waited_s = caught.value.seconds
    assert 0.009 < waited_s <= time.monotonic() - begin
    assert str(caught.value) == f"rollout-0 waited {waited_s:.1f} s for an answer of datapipe"


async def test_timeout_error_of_the_body_passes_through() -> None:
    with pytest.raises(TimeoutError, match="inner"), Wait(event="x", owner="y", seconds=600.0):
        raise TimeoutError("inner")


async def test_inner_deadline_has_precedence() -> None:
    outer, inner = (
        Wait(event="outer", owner="a", seconds=600.0),
        Wait(event="inner", owner="b", seconds=0.01),
    )
    with pytest.raises(DeadlineError) as caught, outer, inner:
        await asyncio.Event().wait()
    assert str(caught.value).endswith(" for inner")


async def test_wait_without_a_deadline_can_be_expired() -> None:
    with pytest.raises(DeadlineError), Wait(event="x", owner="y") as wait:
        asyncio.get_running_loop().call_soon(wait.expire)
        await asyncio.Event().wait()


def test_deadline_without_an_event_loop_is_only_recorded() -> None:
    with Wait(event="x", owner="y", seconds=0.0) as wait:
        assert wait in waits.table
        time.sleep(0.01)
    assert wait not in waits.table and not wait.expired


async def test_wait_without_a_deadline_arms_no_timer() -> None:
    with Wait(event="x", owner="y"):
        assert not timer().waits


async def test_cancellation_passes_through() -> None:
    async def body() -> None:
        with Wait(event="x", owner="y", seconds=600.0):
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class Clock:
    """Clock of the running event loop; the test moves it forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self.now = loop.time()
        monkeypatch.setattr(loop, "time", lambda: self.now)

    async def turn(self, to: float) -> None:
        """Set the clock, and run all callbacks that are due, with their consequences."""
        self.now = to
        for _ in range(20):
            await asyncio.sleep(0)


def timer() -> waits._Timer:
    """Return the timer that all waits of the running loop share."""
    return waits._timer_of(asyncio.get_running_loop())


async def late(seconds: float, *, log: list[float] | None = None) -> str:
    try:
        with Wait(event="x", owner="y", seconds=seconds):
            await asyncio.Event().wait()
    except DeadlineError:
        if log is not None:
            log.append(seconds)
        return "late"
    return "never"


async def test_waits_expire_at_their_deadlines_in_any_order_of_creation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, log = Clock(monkeypatch), list[float]()
    times, begin = [8.0, 2.0, 5.0, 2.0, 11.0], clock.now
    tasks = [asyncio.create_task(late(seconds, log=log)) for seconds in times]
    for second in range(12):
        await clock.turn(begin + second + 0.5)
        assert log == [each for each in sorted(times) if each <= second]
    assert [task.result() for task in tasks] == ["late"] * 5
    assert not timer().waits


async def test_body_that_ends_in_time_is_not_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with Wait(event="x", owner="y", seconds=2.0) as wait:
        await clock.turn(clock.now + 1.0)
    await clock.turn(clock.now + 3.0)
    assert not wait.expired
    task = asyncio.create_task(late(1.0))
    await clock.turn(clock.now)
    await clock.turn(clock.now + 2.0)
    assert task.result() == "late"  # the timer still works


async def test_error_of_the_body_passes_through() -> None:
    with pytest.raises(KeyError), Wait(event="x", owner="y", seconds=1e9):
        raise KeyError("own")


async def test_expire_ends_the_body_at_once() -> None:
    task = asyncio.create_task(late(60))
    await asyncio.sleep(0)
    (wait,) = timer().waits
    wait.expire()
    wait.expire()
    assert await task == "late"
    assert task.cancelling() == 0


async def test_cancellation_from_outside_has_precedence() -> None:
    task = asyncio.create_task(late(60))
    await asyncio.sleep(0)
    (wait,) = timer().waits
    wait.expire()
    task.cancel()
    (result,) = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(result, asyncio.CancelledError)


async def test_outer_wait_raises_if_both_expire_together() -> None:
    outer, inner = (
        Wait(event="outer", owner="a", seconds=60),
        Wait(event="inner", owner="b", seconds=60),
    )
    with pytest.raises(DeadlineError, match="outer"), outer:
        try:
            with inner:
                for wait in (outer, inner):
                    asyncio.get_running_loop().call_soon(wait.expire)
                await asyncio.Event().wait()
        except DeadlineError:
            pytest.fail("the inner one must leave the cancellation to the outer one")
    assert outer.expired and inner.expired
