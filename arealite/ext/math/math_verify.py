"""The reward `math_verify`: 1 if the last answer is mathematically equal to the truth, else 0.

Some answers take seconds to check or never end. So the checks run in processes that can be killed,
and killing one does not affect the checks of the others. An answer that exceeds the CPU limit of a
check or crashes the checker has reward 0 and the part `unchecked`. If a check gets no CPU time or
is killed for another reason, the episode fails.
"""

import asyncio
import json
import re
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from pathlib import Path

from arealite.api.reward import Reward, Score
from arealite.api.task import Task
from arealite.base.errors import EpisodeError, RewardTimeout
from arealite.base.log import get
from arealite.ext.math.checker import number
from arealite.ext.math.reward_options import MathVerifyConfig
from arealite.system.health.waits import Wait

# -P: the math_verify.py in the checker's folder must not hide the library of that name.
COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("checker.py")))
START_S = 60.0
PATIENCE = 30.0
"""Wall-clock seconds allowed for each CPU second of a check."""
TRIES = 3
"""Attempts of a check whose checker is killed or gets no CPU."""
INTEGER = re.compile(r"[-+]?[0-9]{1,64}")
"""Matches one integer that is short enough to compare in the event loop."""
MAX_CHECKED = 200
"""Rows that `check_row` parses; the parser needs about 10 ms for each truth that is no number."""

log = get(__name__)


class CheckerCrash(EpisodeError, failure_class="reward_crash"):
    """A checker was killed repeatedly for a reason outside the answer. There is no reward."""


class BadTruth(EpisodeError, failure_class="reward_truth"):
    """The ground truth has no answer, or comparing any answer with it exceeds the limits."""


class Checker:
    """One checker process. It checks one answer at a time."""

    def __init__(self) -> None:
        self._process: Process | None = None

    async def ask(
        self, completion: str, truth: str, cpu_s: float, wait_s: float
    ) -> bool | str | None:
        """Return the answer of `checker.py`; "killed" if its process has exited.

        Args:
            completion: The text of the model.
            truth: The ground truth.
            cpu_s: CPU seconds of the check.
            wait_s: Wall-clock seconds of the check.

        Raises:
            DeadlineError: The process does not start or does not respond.
        """
        request = json.dumps([completion, truth, cpu_s, wait_s]).encode() + b"\n"
        wait = Wait(
            event="a reward check",
            owner="reward pool",
            on="reward checker",
            seconds=START_S + wait_s,
        )
        try:
            with wait:
                if self._process is None:
                    self._process = await asyncio.create_subprocess_exec(
                        *COMMAND, stdin=PIPE, stdout=PIPE, limit=1024
                    )
                stdin = self._process.stdin
                stdout = self._process.stdout
                assert stdin is not None and stdout is not None
                stdin.write(request)
                await stdin.drain()
                return json.loads(await stdout.readline())
        except (ValueError, ConnectionError, RuntimeError):  # it has exited; uvloop: RuntimeError
            log.warning("reward checker ended")
            await self.close()
            return "killed"
        except BaseException:  # the late answer must not reach the next check
            await self.close()
            raise

    async def close(self) -> None:
        """Kill the process and its child, and wait for their exit."""
        process = self._process
        self._process = None
        if process is not None and process.stdin is not None and process.stdout is not None:
            process.stdin.close()
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            with suppress(RuntimeError):  # a pending check reads the rest
                await process.stdout.read()


class MathVerifyReward(Reward):
    """Scores completions in `config.workers` processes. Each checks one answer at a time."""

    def __init__(self, config: MathVerifyConfig) -> None:
        super().__init__(config)
        self.checked = 0
        self.timeout_s = config.timeout_s
        self.patience_s = PATIENCE * config.timeout_s
        self.checkers = [Checker() for _ in range(config.workers)]
        self._free: asyncio.Queue[Checker] = asyncio.Queue()
        for checker in self.checkers:
            self._free.put_nowait(checker)
        self._setup: asyncio.Task[None] | None = None

    async def setup(self) -> None:
        """Start all processes.

        Raises:
            DeadlineError: A process does not start.
        """
        await asyncio.gather(*(self.check("1", "1") for _ in self.checkers))

    async def begin_setup(self) -> None:
        """Begin to start all processes; a check waits for its process, and starts a dead one."""
        self._setup = asyncio.create_task(self.setup(), name="reward checkers")

    async def score(self, completion: str, ground_truth: str) -> float:
        """Return 1.0 or 0.0.

        Raises:
            EpisodeError: The check failed for a reason outside the answer.
        """
        is_equal = equal_integers(completion, ground_truth)
        if is_equal is None:
            is_equal = await self.check(completion, ground_truth)
        if is_equal is None:
            return Score(0.0, unchecked=1.0)
        return float(is_equal)

    async def check_row(self, task: Task) -> None:
        """Check that the ground truth has an answer.

        Raises:
            EpisodeError: It has none, or cannot be compared.
        """
        is_number = number(task.truth) is not None
        if is_number or self.checked >= MAX_CHECKED:
            return
        self.checked += 1
        await self.check("", task.truth)

    async def check(self, completion: str, truth: str) -> bool | None:
        """Wait for a free checker and check a completion.

        Returns:
            Whether the answer equals `truth`. None: the answer needed more than `timeout_s` of CPU
            time, or crashed the checker twice.

        Raises:
            RewardTimeout: The checker got no CPU time for `patience_s`, in every attempt.
            CheckerCrash: The checker was killed in every attempt.
            BadTruth: The truth cannot be parsed, or exceeds the limits with any answer.
        """
        checker = await self._free.get()
        try:
            answer = await self._ask(checker, completion, truth)
            if answer in ("cpu", "crashed"):
                answer = await self._ask(checker, "\\boxed{0}", truth)
                if isinstance(answer, bool):  # another answer can be checked against this truth
                    return None
        finally:
            self._free.put_nowait(checker)
        if answer == "waited":
            raise RewardTimeout(f"a check got no CPU for {self.patience_s} s, {TRIES} times")
        if answer == "killed":
            raise CheckerCrash(f"the process of a reward check was killed {TRIES} times")
        if not isinstance(answer, bool):
            raise BadTruth(f"no answer can be compared with ground_truth={truth[:200]!r}")
        return answer

    async def _ask(self, checker: Checker, completion: str, truth: str) -> bool | str | None:
        """Repeat a check that was killed or got no CPU; accept "crashed" if it recurs."""
        answer = None
        for _ in range(TRIES):
            previous_answer = answer
            answer = await checker.ask(completion, truth, self.timeout_s, self.patience_s)
            if answer in ("waited", "killed"):
                continue
            if answer == "crashed" and previous_answer != "crashed":
                continue
            break
        return answer

    async def close(self) -> None:
        """Kill all processes."""
        if self._setup is not None:
            self._setup.cancel()
            await asyncio.gather(self._setup, return_exceptions=True)
        await asyncio.gather(*(checker.close() for checker in self.checkers))


def equal_integers(completion: str, truth: str) -> bool | None:
    """Compare two integers; None if a text is not an integer and needs a checker."""
    answer_digits = completion.strip()
    truth_digits = truth.strip()
    if INTEGER.fullmatch(answer_digits) and INTEGER.fullmatch(truth_digits):
        return int(answer_digits) == int(truth_digits)
    return None
