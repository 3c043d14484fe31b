"""A wait that ends late names itself; a wait that ends in time leaves no trace."""

from __future__ import annotations

import asyncio
import time

import pytest

from arealite.base.errors import DeadlineError
from arealite.system.health.waits import deadline


async def test_a_late_wait_names_itself() -> None:
    begin = time.monotonic()
    with pytest.raises(DeadlineError) as caught:
        async with deadline("an answer of datapipe", owner="rollout-0", seconds=0.01):
            await asyncio.Event().wait()
    waited_s = caught.value.seconds
    assert 0.009 < waited_s <= time.monotonic() - begin
    assert str(caught.value) == f"rollout-0 waited {waited_s:.1f} s for an answer of datapipe"


async def test_a_timeout_of_the_body_is_not_ours() -> None:
    with pytest.raises(TimeoutError, match="inner"):
        async with deadline("x", owner="y", seconds=600.0):
            raise TimeoutError("inner")


async def test_the_inner_deadline_wins() -> None:
    with pytest.raises(DeadlineError) as caught:
        async with (
            deadline("outer", owner="a", seconds=600.0),
            deadline("inner", owner="b", seconds=0.01),
        ):
            await asyncio.Event().wait()
    assert caught.value.waiting_for == "inner"


async def test_none_waits_and_can_be_rescheduled() -> None:
    with pytest.raises(DeadlineError):
        async with deadline("x", owner="y", seconds=None) as timer:
            timer.reschedule(asyncio.get_running_loop().time())
            await asyncio.Event().wait()


async def test_cancellation_passes_through() -> None:
    async def body() -> None:
        async with deadline("x", owner="y", seconds=600.0):
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
