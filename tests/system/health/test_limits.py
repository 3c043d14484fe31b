"""Many limits on one timer: each ends its own body, at its own time."""

from __future__ import annotations

import asyncio

import pytest

from arealite.system.health.waits import Limit, Limits


class Clock:
    """The running loop's, which goes on when it is turned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self.now = loop.time()
        monkeypatch.setattr(loop, "time", lambda: self.now)

    async def turn(self, to: float) -> None:
        """Let the loop do all that is due then, and what comes of it."""
        self.now = to
        for _ in range(20):
            await asyncio.sleep(0)


async def wait(limits: Limits, seconds: float, *, log: list[float] | None = None) -> str:
    try:
        with Limit(limits, asyncio.get_running_loop().time() + seconds):
            await asyncio.Event().wait()
    except TimeoutError:
        if log is not None:
            log.append(seconds)
        return "late"
    return "never"


async def test_each_rings_at_its_own_time_whatever_the_order_of_their_making(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, limits, log = Clock(monkeypatch), Limits(), list[float]()
    times, begin = [8.0, 2.0, 5.0, 2.0, 11.0], clock.now
    tasks = [asyncio.create_task(wait(limits, seconds, log=log)) for seconds in times]
    for second in range(12):
        await clock.turn(begin + second + 0.5)
        assert log == [each for each in sorted(times) if each <= second]
    assert [task.result() for task in tasks] == ["late"] * 5
    assert not limits.held


async def test_a_body_that_ends_in_time_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, limits = Clock(monkeypatch), Limits()
    with Limit(limits, clock.now + 2.0) as limit:
        await clock.turn(clock.now + 1.0)
    await clock.turn(clock.now + 3.0)
    assert not limit.expired
    task = asyncio.create_task(wait(limits, 1.0))
    await clock.turn(clock.now)
    await clock.turn(clock.now + 2.0)
    assert task.result() == "late"  # the timer was not lost with it


async def test_an_error_of_the_body_passes_through() -> None:
    with pytest.raises(KeyError), Limit(Limits(), 1e12):
        raise KeyError("own")


async def test_expire_ends_it_now() -> None:
    limits = Limits()
    task = asyncio.create_task(wait(limits, 60))
    await asyncio.sleep(0)
    (limit,) = limits.held
    limit.expire()
    limit.expire()
    assert await task == "late"
    assert task.cancelling() == 0


async def test_a_cancellation_from_outside_wins() -> None:
    limits = Limits()
    task = asyncio.create_task(wait(limits, 60))
    await asyncio.sleep(0)
    (limit,) = limits.held
    limit.expire()
    task.cancel()
    (result,) = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(result, asyncio.CancelledError)


async def test_the_outer_of_two_that_ring_together_has_the_word() -> None:
    limits, when = Limits(), asyncio.get_running_loop().time() + 0.02
    inner = None
    with pytest.raises(TimeoutError), Limit(limits, when) as outer:
        try:
            with Limit(limits, when) as inner:
                await asyncio.Event().wait()
        except TimeoutError:
            pytest.fail("the inner one must leave the cancellation to the outer one")
    assert inner is not None
    assert outer.expired and inner.expired
