"""A pool of checker processes that can be killed at any moment without losing another's check.

Pathological answers burn seconds or never end; threads cannot be stopped, processes can.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from pathlib import Path
from typing import Any

from arealite.base.errors import DeadlineError, EpisodeError, RewardTimeout, RoleError
from arealite.base.log import get
from arealite.system.deadlines import deadline

# -P: the checker's own folder holds a math_verify.py, which must not hide the library.
COMMAND = sys.executable, "-P", str(Path(__file__).with_name("checker.py"))
START_S = 60.0

log = get(__name__)


class CheckerDied(Exception):
    """The process ended in the middle of a check."""


class CheckerCrash(EpisodeError):
    """The answer ended its checker process twice; the sample has no reward."""

    failure_class = "reward_crash"


class Checker:
    """One warm parent process and its working child; checks one answer at a time."""

    def __init__(self) -> None:
        self.pid: int | None = None
        """Of the child; None until `revive` has found one that waits for requests."""
        self._process: Process | None = None
        self._closed = False

    async def check(self, completion: str, truth: str, timeout_s: float) -> bool:
        """Return whether the answers are equal.

        Raises:
            RewardTimeout: the limit has passed; the child is dead.
            CheckerDied: the child, or its parent, ended.
        """
        if self.pid is None:
            await self.revive()
        try:
            what, on = "a reward check", f"reward checker {self.pid}"
            async with deadline(what, owner="reward pool", on=on, seconds=timeout_s):
                await self._send({"completion": completion, "truth": truth})
                answer = await self._receive()
        except DeadlineError as error:
            self._kill()
            raise RewardTimeout(f"a reward check was killed after {timeout_s} s") from error
        except asyncio.CancelledError:
            self._kill()
            raise
        if "pid" in answer:
            await self._greet(answer["pid"])
            raise CheckerDied
        return bool(answer["equal"])

    async def revive(self) -> None:
        """Wait for the newest child to report, starting the parent if it is gone."""
        what, on = "a reward checker to start", "reward checker"
        async with deadline(what, owner="reward pool", on=on, seconds=START_S):
            while self.pid is None:
                if self._closed:
                    raise CheckerDied
                try:
                    if self._process is None:
                        self._process = await asyncio.create_subprocess_exec(
                            *COMMAND, stdin=PIPE, stdout=PIPE
                        )
                    message = await self._receive()
                    if "pid" in message:
                        await self._greet(message["pid"])
                except CheckerDied:
                    log.warning("reward checker ended")

    async def close(self) -> None:
        """End both processes for good and wait for them."""
        self._closed = True
        await self._stop()

    def _kill(self) -> None:
        """End the child at once; its parent forks the next."""
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.pid = None

    async def _stop(self) -> None:
        self._kill()
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _greet(self, pid: int) -> None:
        """Tell a new child that what comes next is for it."""
        # Known before the send: cancelled in it, the child still gets the word and waits for work.
        self.pid = pid
        await self._send({"go": pid})

    async def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            await self._stop()
            raise CheckerDied from error

    async def _receive(self) -> dict[str, int]:
        assert self._process is not None and self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line.endswith(b"\n"):
            await self._stop()
            raise CheckerDied
        return json.loads(line)


class CheckerPool:
    """Gives each check a free checker; as many run at once as there are workers."""

    def __init__(self, *, workers: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.checkers = [Checker() for _ in range(workers)]
        self._free: asyncio.Queue[Checker] = asyncio.Queue()
        for checker in self.checkers:
            self._free.put_nowait(checker)

    async def start(self) -> None:
        """Start all processes together; a checker that cannot be started stops the run."""
        try:
            async with asyncio.TaskGroup() as group:
                for checker in self.checkers:
                    group.create_task(checker.revive())
        except* RoleError as errors:
            raise errors.exceptions[0] from None

    async def check(self, completion: str, truth: str) -> bool:
        """Return whether the last answer in `completion` equals `truth`, once a checker is free.

        Raises:
            RewardTimeout: the check ran longer than `timeout_s` and was killed.
            CheckerCrash: its process died twice.
        """
        checker = await self._free.get()
        try:
            for _ in range(2):
                with suppress(CheckerDied):
                    return await checker.check(completion, truth, self.timeout_s)
            raise CheckerCrash("a reward check ended its process twice")
        finally:
            self._free.put_nowait(checker)

    async def close(self) -> None:
        """End every process."""
        await asyncio.gather(*(checker.close() for checker in self.checkers))
