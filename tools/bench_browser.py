"""Measure MiniWoB++ in real Chromium: steps per second, reset time, and memory of a context.

Many contexts share one browser; this benchmark measures how time and memory grow with them.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

import psutil  # noqa: E402

from arealite.api.episode import Action  # noqa: E402
from arealite.api.observation import Observation  # noqa: E402
from arealite.api.task import Task  # noqa: E402
from arealite.ext.web.config import BrowserConfig, BrowserEnvConfig  # noqa: E402
from arealite.ext.web.miniwob import BrowserEnv  # noqa: E402
from tools import figures  # noqa: E402

CONTEXTS, REPEATS, EPISODES, STEPS = (1, 3, 15, 30), 3, 45, 5
TASKS = ("click-checkboxes-large", "email-inbox", "choose-list")
"""Tasks of several steps, with pages of usual size; the agent ends none of them early."""


class Clicker:
    """Agent that clicks the first element, which ends none of the tasks."""

    def __init__(self) -> None:
        self.steps = 0

    async def act(self, observation: Observation) -> Action:
        """Click the first element."""
        self.steps += 1
        return Action(observation.choices[0])

    def reward(self, value: float, **parts: float) -> None:
        """Ignore the reward."""


def memory_mb() -> float:
    """Return the memory of the browser and its driver as proportional set size (PSS)."""
    children = psutil.Process().children(recursive=True)
    return sum(child.memory_full_info().pss for child in children) / 2**20


def cpu_s() -> float:
    """Return the processor time that this process and the browser have used."""
    own = psutil.Process()
    times = [each.cpu_times() for each in [own, *own.children(recursive=True)]]
    return sum(each.user + each.system for each in times)


async def bench(contexts: int) -> dict[str, float]:
    """Play at one number of contexts; return medians."""
    config = BrowserEnvConfig(
        tasks=[*TASKS], max_steps=STEPS, browser=BrowserConfig(contexts=contexts)
    )
    env = BrowserEnv(None, config)
    await env.setup()
    resets, rates, costs = list[float](), list[float](), list[float]()
    try:
        rows = islice(BrowserEnv.rows(config, split="train", seed=1), EPISODES)
        tasks = [
            Task(
                task_id=row["prompt"],
                prompt=row["prompt"],
                ground_truth=None,
                extra_info=row["extra_info"],
            )
            for row in rows
        ]
        empty = memory_mb()
        for _ in range(REPEATS + 1):  # the first round creates the contexts and fills the caches
            begin, used = time.perf_counter(), cpu_s()
            players = [Clicker() for _ in tasks]
            each: list[tuple[Task, Any]] = [*zip(tasks, players, strict=True)]
            await asyncio.gather(*(env.run(task, agent=player) for task, player in each))
            seconds = time.perf_counter() - begin
            steps = sum(player.steps for player in players)
            rates.append(steps / seconds)
            costs.append((cpu_s() - used) / steps)
        full = memory_mb()
        async with env.browser.page() as page:
            for task in tasks:
                begin = time.perf_counter()
                await env._begin(page, task.prompt, 1)
                resets.append(time.perf_counter() - begin)
    finally:
        await env.close()
    return {
        "steps_per_s": statistics.median(rates[1:]),
        "cpu_ms_per_step": 1000 * statistics.median(costs[1:]),
        "mb": full,
        "mb_without_contexts": empty,
        "reset_ms": 1000 * statistics.median(resets),
    }


def main() -> int:
    """Print the table and write out/bench/browser.json."""
    metrics = {contexts: asyncio.run(bench(contexts)) for contexts in CONTEXTS}
    one = metrics[CONTEXTS[0]]["mb"]
    print(f"MiniWoB++, {EPISODES} episodes of {STEPS} steps x {REPEATS}, resets included:")
    print("  contexts  steps/s  CPU ms/step     MB  MB a context more  reset ms")
    for contexts, at in metrics.items():
        at["mb_per_context"] = (at["mb"] - one) / max(1, contexts - CONTEXTS[0])
        rate, cost, mb, _, reset, more = at.values()
        print(f"  {contexts:8} {rate:8.1f} {cost:12.1f} {mb:6.0f} {more:18.1f} {reset:9.1f}")
    figures.save("browser.json", metrics)
    return 0


if __name__ == "__main__":
    sys.exit(main())
