"""Measure the sandboxes of this host: programs per second, sixteen at a time, and scored programs.

The speed of a coding run depends on this: each program starts a confined Python process.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from arealite.api.task import Task  # noqa: E402
from arealite.base.errors import UserError  # noqa: E402
from arealite.ext.code.config import CodeEnvConfig  # noqa: E402
from arealite.ext.code.env import CodeEnv, read_cases  # noqa: E402
from arealite.ext.sandbox.config import SandboxConfig  # noqa: E402
from tools import figures  # noqa: E402
from tools.bench_reward import measure  # noqa: E402

RUNS, REPEATS, AT_ONCE = 128, 3, 16
CASES = {"entry_point": "f", "cases": [{"args": [x], "expected": x + 1} for x in range(5)]}


async def bench() -> dict[str, float]:
    """Measure the sandboxes alternately; return medians."""
    envs: dict[str, CodeEnv] = {}
    for backend in ("bwrap", "unsafe"):
        sandbox = SandboxConfig(backend=backend, concurrency=AT_ONCE, timeout_s=60.0)
        env = CodeEnv(None, CodeEnvConfig(sandbox=sandbox, case_timeout_s=30.0))
        with suppress(UserError):  # this host has no bubblewrap
            await env.setup()
            envs[backend] = env
    cases = read_cases(Task(task_id="bench", prompt="", ground_truth=None, extra_info=CASES), 30.0)
    rates: dict[str, list[float]] = {}
    stalls: list[float] = []

    async def many(run: Callable[[], Awaitable[object]]) -> None:
        await asyncio.gather(*(run() for _ in range(RUNS)))

    def bare() -> Awaitable[object]:
        return interpreter(slots)

    slots = asyncio.Semaphore(AT_ONCE)
    for _ in range(REPEATS):
        kinds: dict[str, Callable[[], Awaitable[object]]] = {"bare python": bare}
        for name, env in envs.items():
            kinds[name] = lambda env=env: env.sandbox.run("print(1)")
            kinds[f"{name}, 5 cases"] = lambda env=env: env.judge("def f(x): return x + 1", cases)
        for name, run in kinds.items():
            seconds, stall = await measure(lambda run=run: many(run))
            rates.setdefault(f"{name} per s", []).append(RUNS / seconds)
            stalls.append(stall)
    one: list[float] = []
    for _ in range(20):
        begin = time.perf_counter()
        await next(iter(envs.values())).sandbox.run("")
        one.append(time.perf_counter() - begin)
    return {
        **{name: statistics.median(values) for name, values in rates.items()},
        "one alone ms": 1000 * statistics.median(one),
        "loop stall max ms": 1000 * max(stalls),
    }


async def interpreter(slots: asyncio.Semaphore) -> None:
    """Start Python without a sandbox, as the baseline."""
    async with slots:
        words = sys.executable, "-I", "-c", "print(1)"
        process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
        await process.communicate()


def main() -> int:
    """Print the table and write out/bench/sandbox.json."""
    metrics = asyncio.run(bench())
    print(f"sandboxes, {RUNS} programs x {REPEATS}, {AT_ONCE} at once:")
    figures.show(metrics)
    figures.save("sandbox.json", metrics)
    return 0


if __name__ == "__main__":
    sys.exit(main())
