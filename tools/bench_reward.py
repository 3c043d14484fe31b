"""Measure the pool of the maths reward: checks per second, and how long it blocks the event loop.

Every maths episode waits for a check, in the event loop that also drives all generations.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from arealite.api.reward import MathVerifyConfig  # noqa: E402
from arealite.impl.reward.checker import is_equal  # noqa: E402
from arealite.impl.reward.math_verify import MathVerifyReward  # noqa: E402
from tools import figures  # noqa: E402

CHECKS, REPEATS, WORKERS, TICK_S = 300, 5, 2, 0.001
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


def main() -> int:
    """Print the table and write out/bench/reward.json."""
    metrics = asyncio.run(bench())
    print(f"maths reward, {WORKERS} workers, {CHECKS} checks x {REPEATS}:")
    figures.show(metrics)
    figures.save("reward.json", metrics)
    return 0


if __name__ == "__main__":
    sys.exit(main())
