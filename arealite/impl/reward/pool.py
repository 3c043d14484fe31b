"""A pool of checker processes that can be killed at any moment without losing another's check.

Pathological answers burn seconds or never end; threads cannot be stopped, processes can.
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from pathlib import Path

from arealite.base.errors import EpisodeError, RewardTimeout
from arealite.base.log import get
from arealite.system.health.deadlines import deadline

# -P: the checker's own folder holds a math_verify.py, which must not hide the library.
COMMAND = sys.executable, "-P", str(Path(__file__).with_name("checker.py"))
START_S = 60.0

log = get(__name__)


class CheckerCrash(EpisodeError):
    """The answer ended its checker process twice; the sample has no reward."""

    failure_class = "reward_crash"


class Checker:
    """One warm process and its working child; checks one answer at a time."""

    def __init__(self) -> None:
        self._process: Process | None = None

    async def ask(self, completion: str, truth: str, timeout_s: float) -> bool | str:
        """Return whether the answers are equal, "timeout" if it took too long, or "died".

        Raises:
            DeadlineError: the process cannot be started, or its parent does nothing.
        """
        what, seconds = "a reward check", START_S + timeout_s
        try:
            async with deadline(what, owner="reward pool", on="reward checker", seconds=seconds):
                if self._process is None:
                    self._process = await asyncio.create_subprocess_exec(
                        *COMMAND, stdin=PIPE, stdout=PIPE, limit=1024
                    )
                stdin, stdout = self._process.stdin, self._process.stdout
                assert stdin is not None and stdout is not None
                stdin.write(json.dumps([completion, truth, timeout_s]).encode() + b"\n")
                await stdin.drain()
                return json.loads(await stdout.readline())
        except (ValueError, ConnectionError, RuntimeError):  # it is no more; the last is uvloop's
            log.warning("reward checker ended")
            await self.close()
            return "died"
        except BaseException:  # so that its answer never reaches the next check
            await self.close()
            raise

    async def close(self) -> None:
        """End the process, which takes its child along, and wait for it."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None and process.stdout is not None:
            process.stdin.close()
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            with suppress(RuntimeError):  # a check that still waits reads it to its end
                await process.stdout.read()


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
        await asyncio.gather(*(self.check("1", "1", START_S) for _ in self.checkers))

    async def check(self, completion: str, truth: str, timeout_s: float | None = None) -> bool:
        """Return whether the last answer in `completion` equals `truth`, once a checker is free.

        Raises:
            RewardTimeout: the check ran longer than `timeout_s` and was killed.
            CheckerCrash: its process died twice.
        """
        seconds = timeout_s or self.timeout_s
        checker = await self._free.get()
        try:
            for _ in range(2):
                answer = await checker.ask(completion, truth, seconds)
                if answer == "timeout":
                    raise RewardTimeout(f"a reward check was killed after {seconds} s")
                if isinstance(answer, bool):
                    return answer
            raise CheckerCrash("a reward check ended its process twice")
        finally:
            self._free.put_nowait(checker)

    async def close(self) -> None:
        """End every process."""
        await asyncio.gather(*(checker.close() for checker in self.checkers))
