"""Gives every wait that crosses a process a name, an owner and an end.

Here, below all roles, because a hang that names nobody is what no test of a single part can find.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from arealite.base.errors import DeadlineError
from arealite.system.health.waits import waiting


@asynccontextmanager
async def deadline(
    waiting_for: str, *, owner: str, on: str = "", seconds: float | None, prompt: bool = False
) -> AsyncGenerator[asyncio.Timeout, None]:
    """Bound the body's time; `seconds` None waits for ever (for ends that a person decides).

    `on` names who has to act, and `prompt` says whether it should at once (see `waits.Wait`).

    The yielded `asyncio.Timeout` may be rescheduled. A TimeoutError of the body's own passes
    through unchanged.

    Raises:
        DeadlineError: the body took longer; names what was waited for, who waited and for how long.
    """
    begin = time.monotonic()
    timer = asyncio.timeout(seconds)
    try:
        with waiting(waiting_for, owner=owner, on=on, seconds=seconds, prompt=prompt):
            async with timer:
                yield timer
    except TimeoutError as error:
        if not timer.expired() or isinstance(error, DeadlineError):
            raise
        waited = time.monotonic() - begin
        raise DeadlineError(waiting_for, owner=owner, seconds=waited) from error
