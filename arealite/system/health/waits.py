"""Names every wait that crosses a process: for what, on which role, since when and until when.

One table a process, because a hang is explained by the waits of all processes together: vitals show
the table outside, and `arealite why` combines the tables of all roles. Three ways to wait, one
table: `waiting` has no end of its own, `deadline` ends its body with a DeadlineError, and `Limit`
is a deadline for hundreds of waits at once.
"""

from __future__ import annotations

import asyncio
import math
import time
import types
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self, cast

from arealite.base.errors import DeadlineError

OTHER_RANKS = "the other ranks"
"""As `on`: those trainer ranks whose counter "collectives" is behind this one's."""
KEEPER = "keeper"
"""As `owner`: a parent process that is starting role `on`. `detail` is the reason of the last death
of that role; "" if there was none."""
PAUSER = "pauser"
"""As `owner`: a publisher that finds server `on` paused by another client. `detail` says more."""
ITSELF = "itself"
"""As `on`, of a computation: by experience, it takes no longer than `seconds`."""


@dataclass(slots=True, eq=False)
class Wait:
    """One wait that crosses a process."""

    what: str
    """For which event, as in "batch 12" or "the answer to /generate of g3/0"."""
    owner: str
    """Who waits, as in "trainer rank 0"."""
    on: str
    """Who has to act, by the name of its role where it has one: "datapipe-0", "rollout-1",
    "trainer-1", "llm_server-127.0.0.1-8123", "environment math", OTHER_RANKS."""
    seconds: float | None = None
    """When it ends by itself; None: only by the event."""
    prompt: bool = False
    """Whether a live process answers, or at least says who else is waited for, within a second or
    two; else it may take as long as it takes, and nobody is to blame."""
    since: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    """When whom it waits for last gave a sign, or it began."""
    detail: str = ""
    """What is known meanwhile, by the last word of whom is waited for."""

    def hear(self, detail: str = "") -> None:
        """Note a sign of whom is waited for."""
        self.heard = time.monotonic()
        self.detail = detail or self.detail


table: set[Wait] = set()
"""Of this process. A thread may read a copy (`list(table)`) at any time."""

counters: dict[str, float] = {}
"""Numbers of this process that vitals show besides."""


@contextmanager
def waiting(
    what: str, *, owner: str, on: str, seconds: float | None = None, prompt: bool = False
) -> Generator[Wait, None, None]:
    """Show a wait for the time of the body; it does not end the body (`deadline` does)."""
    wait = Wait(what, owner, on, seconds, prompt)
    table.add(wait)
    try:
        yield wait
    finally:
        table.discard(wait)


@asynccontextmanager
async def deadline(
    waiting_for: str, *, owner: str, on: str = "", seconds: float | None, prompt: bool = False
) -> AsyncGenerator[asyncio.Timeout, None]:
    """Bound the body's time; `seconds` None waits for ever (for ends that a person decides).

    `on` names who has to act, and `prompt` says whether it should at once (see `Wait`).

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


END_S = 5.0
"""What a limit ends has this long for what it cleans up; then it is left."""


class Limit(Wait):
    """Ends its body with a TimeoutError at `when` (the loop's time), or once `expire` is called.

    Made and used as a context manager by the task that waits. Without a name (`what`) it is not in
    the table.

    asyncio.timeout arms a timer for each wait; that costs more than all else that an episode does,
    and hardly one of them ever rings. All `Limits` of a loop share one timer.
    """

    __slots__ = ("_base", "_limits", "_task", "expired", "left", "when")

    def __init__(
        self, limits: Limits, when: float, *, what: str = "", owner: str = "", on: str = ""
    ) -> None:
        # Not by Wait.__init__, which takes twice as long: an episode makes several of these.
        self.what, self.owner, self.on, self.when = what, owner, on, when
        self.since = self.heard = time.monotonic()
        self.seconds, self.detail = when - self.since, ""
        self.prompt = self.expired = self.left = False
        self._limits = limits
        self._task = cast("asyncio.Task[object]", asyncio.current_task())

    def __enter__(self) -> Self:
        self._limits.add(self)
        if self.what:
            table.add(self)
        self._base = self._task.cancelling()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._limits.held.discard(self)
        table.discard(self)
        if self.left:
            self._task.uncancel()
        # As in asyncio.timeout, whoever else cancelled the task meanwhile has precedence.
        if self.expired and self._task.uncancel() <= self._base and kind is asyncio.CancelledError:
            raise TimeoutError

    def expire(self) -> None:
        """End the body now."""
        if not self.expired:
            self.expired = True
            self._task.cancel()

    def leave(self) -> None:
        """End a body that is `held`, and swallows that it is cancelled."""
        if self in self._limits.held and not self.left:
            self.left = True
            self._task.cancel()

    @types.coroutine
    def hold(self, held: Coroutine[Any, Any, None]) -> Generator[Any, Any, None]:
        """Await a coroutine in the body; one that goes on for END_S after the limit is left where
        it stands, and never goes on.
        """
        step: Callable[[Any], Any] = held.send
        value: Any = None
        while True:
            try:
                wait = step(value)
            except StopIteration:
                return
            if not self.expired:  # until Python 3.13 a TaskGroup that failed leaves it cancelled
                self._base = self._task.cancelling()
            try:
                step, value = held.send, (yield wait)
            except BaseException as error:
                if self.left:
                    with suppress(Exception):  # it may swallow that, too
                        held.close()
                    raise
                step, value = held.throw, error
                if self.expired:
                    asyncio.get_running_loop().call_later(END_S, self.leave)


def is_cancelled() -> bool:
    """Say whether the current task is cancelled itself, and not only something it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Limits:
    """The limits in force in one event loop."""

    def __init__(self) -> None:
        self.held: set[Limit] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = math.inf

    def add(self, limit: Limit) -> None:
        """Put a limit in force."""
        self.held.add(limit)
        if limit.when < self._rings_at:
            if self._timer is not None:
                self._timer.cancel()
            self._rings_at = limit.when
            self._timer = asyncio.get_running_loop().call_at(limit.when, self._ring)

    def _ring(self) -> None:
        now = asyncio.get_running_loop().time()
        self._rings_at, self._timer = math.inf, None
        for limit in self.held:
            if limit.when <= now:
                limit.expire()
        running = [limit for limit in self.held if not limit.expired]
        if running:
            self.add(min(running, key=lambda limit: limit.when))
