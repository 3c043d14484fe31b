"""Measure the pool of the maths reward and the processes of reward functions.

Every episode waits for a reward, in the event loop that also drives all generations: the table has
checks and calls per second, and how long they block this event loop.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

import uvloop  # noqa: E402

from arealite.api.reward import Reward  # noqa: E402
from arealite.api.task import Task  # noqa: E402
from arealite.ext.math.checker import is_equal  # noqa: E402
from arealite.ext.math.math_verify import MathVerifyReward  # noqa: E402
from arealite.ext.math.reward_options import MathVerifyConfig  # noqa: E402
from arealite.ext.rewards.config import FunctionRewardConfig  # noqa: E402
from arealite.ext.rewards.function_reward import FunctionReward  # noqa: E402
from tools import figures  # noqa: E402

CHECKS, REPEATS, WORKERS, TICK_S = 300, 5, 2, 0.001
CALLS, EPISODES = 20, 256
"""Calls of a function in each episode, and concurrent episodes."""
FUNCTIONS = """
def cheap(completion, ground_truth):
    return float(completion == ground_truth)

async def cheap_async(completion, ground_truth):
    return float(completion == ground_truth)
"""
ENDLESS = "$9^{9^{9^{9}}}$"


def questions(count: int) -> list[tuple[str, str]]:
    """Return completions in several notations; half of them are right."""
    notations = ("so the answer is ${}x/7$", "thus \\boxed{{\\frac{{{}x}}{{7}}}}", "it is {}/7")
    rows = ((notations[n % 3].format(n), f"\\frac{{{n + n % 2}}}{{7}}") for n in range(1, count))
    return [*rows, ("we get $\\sqrt{2}$", "\\sqrt{2}")]


async def measure(work: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """Run `work`; return its seconds and the longest stall of the event loop in seconds."""
    stalls: list[float] = []

    async def tick() -> None:
        while True:
            begin = time.perf_counter()
            await asyncio.sleep(TICK_S)
            stalls.append(time.perf_counter() - begin - TICK_S)

    ticker = asyncio.ensure_future(tick())
    begin = time.perf_counter()
    await work()
    seconds = time.perf_counter() - begin
    ticker.cancel()
    await asyncio.gather(ticker, return_exceptions=True)
    return seconds, max(stalls, default=0.0)


async def bench() -> dict[str, float]:
    """Measure pool, plain calls and a kill, alternately; return medians."""
    reward = MathVerifyReward(MathVerifyConfig(workers=WORKERS, timeout_s=1.0))
    start_s, start_stall_s = await measure(reward.setup)
    rows = questions(CHECKS)
    rates: list[float] = []
    plain: list[float] = []
    stalls: list[float] = [start_stall_s]
    kills: list[float] = []

    async def check_all() -> None:
        await asyncio.gather(*(reward.score(*row) for row in rows))

    async def kill() -> None:
        await reward.score(ENDLESS, "\\sqrt{2}")
        await reward.score("1/2", "0.5")

    try:
        await check_all()
        for _ in range(REPEATS):
            seconds, stall = await measure(check_all)
            rates.append(len(rows) / seconds)
            stalls.append(stall)
            begin = time.perf_counter()
            for row in rows[:100]:
                is_equal(*row)
            plain.append(100 / (time.perf_counter() - begin))
            seconds, stall = await measure(kill)
            kills.append(seconds - 1.0)
            stalls.append(stall)
    finally:
        await reward.close()
    begin = time.perf_counter()
    for n in range(10_000):
        await reward.score(str(n), str(n))
    return {
        "checks_per_s": statistics.median(rates),
        "plain_calls_per_s_one_process": statistics.median(plain),
        "loop_stall_max_ms": 1000 * max(stalls),
        "loop_stall_median_ms": 1000 * statistics.median(stalls),
        "kill_to_next_check_ms": 1000 * statistics.median(kills),
        "start_s": start_s,
        "short_cuts_per_s": 10_000 / (time.perf_counter() - begin),
    }


async def bench_function(path: str) -> dict[str, float]:
    """Measure calls of a function from concurrent episodes; return medians."""
    reward = FunctionReward(FunctionRewardConfig(paths=[path]))
    start_s, start_stall_s = await measure(reward.setup)
    rates: list[float] = []
    stalls: list[float] = [start_stall_s]
    cpu_s = time.process_time()
    task = Task(
        task_id="train-0",
        prompt="What is 17 times 23? " * 10,
        ground_truth="391",
        extra_info={"data_source": "bench"},
    )
    try:
        for _ in range(REPEATS):
            seconds, stall = await measure(lambda: play(reward, task))
            rates.append(CALLS * EPISODES / seconds)
            stalls.append(stall)
        cpu_s = time.process_time() - cpu_s
    finally:
        await reward.close()
    name = path.rpartition(":")[2]
    return {
        f"{name}_calls_per_s": statistics.median(rates),
        f"{name}_worker_cpu_us_per_call": 1e6 * cpu_s / (REPEATS * CALLS * EPISODES),
        f"{name}_loop_stall_max_ms": 1000 * max(stalls),
        f"{name}_start_s": start_s,
    }


async def play(reward: Reward, task: Task) -> None:
    """Score EPISODES episodes concurrently, each CALLS times."""

    async def episode() -> None:
        for _ in range(CALLS):
            await reward.score_task("the answer is 391", task)

    await asyncio.gather(*(episode() for _ in range(EPISODES)))


def main() -> int:
    """Print the tables and write out/bench/reward.json."""
    metrics = asyncio.run(bench())
    print(f"maths reward, {WORKERS} workers, {CHECKS} checks x {REPEATS}:")
    figures.show(metrics)
    of_functions: dict[str, float] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        asyncio.Runner(
            loop_factory=uvloop.new_event_loop  # as in workers
        ) as runner,
    ):
        file = Path(folder) / "bench_functions.py"
        file.write_text(FUNCTIONS)
        for name in ("cheap", "cheap_async"):
            of_functions |= runner.run(bench_function(f"{file}:{name}"))
    print(f"functions in one process, {EPISODES} episodes x {CALLS} calls x {REPEATS}:")
    figures.show(of_functions)
    metrics |= of_functions
    figures.save("reward.json", metrics)
    return 0


if __name__ == "__main__":
    sys.exit(main())
