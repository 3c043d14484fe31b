"""Many limits on one timer: each ends its own body, at its own time."""

from __future__ import annotations

import asyncio

import pytest

from arealite.system.health.limits import Limit, Limits


async def wait(limits: Limits, seconds: float, *, log: list[float] | None = None) -> str:
    try:
        with Limit(limits, asyncio.get_running_loop().time() + seconds):
            await asyncio.Event().wait()
    except TimeoutError:
        if log is not None:
            log.append(seconds)
        return "late"
    return "never"


async def test_each_rings_at_its_own_time_whatever_the_order_of_their_making() -> None:
    limits, log = Limits(), []
    times = [0.08, 0.02, 0.05, 0.02, 0.11]
    async with asyncio.timeout(60):
        found = await asyncio.gather(*(wait(limits, seconds, log=log) for seconds in times))
    assert found == ["late"] * 5
    assert log == sorted(times)
    assert not limits.held


async def test_a_body_that_ends_in_time_is_left_alone() -> None:
    limits = Limits()
    loop = asyncio.get_running_loop()
    with Limit(limits, loop.time() + 0.02) as limit:
        await asyncio.sleep(0)
    await asyncio.sleep(0.04)
    assert not limit.expired
    assert await wait(limits, 0.01) == "late"  # the timer was not lost with it


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
