"""MiniWoB++ in real Chromium: steps a second, a reset's time, and the memory of a context.

Here because a browser environment is slow and large unless many contexts share one browser.
"""

from __future__ import annotations

import asyncio
import json
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

from arealite.api.browser_config import BrowserConfig, BrowserEnvConfig  # noqa: E402
from arealite.api.episode import Action  # noqa: E402
from arealite.api.observation import Observation  # noqa: E402
from arealite.api.task import Task  # noqa: E402
from arealite.impl.env.browser import BrowserEnv, page_path  # noqa: E402

CONTEXTS, REPEATS, EPISODES, STEPS = (1, 3, 15, 30), 3, 60, 5
TASKS = ("click-checkboxes-large", "email-inbox", "choose-list")
"""Of several steps, with pages of common size; the agent stops at none of them early."""


class Clicker:
    """Clicks the first element, which ends none of the tasks."""

    def __init__(self) -> None:
        self.steps = 0

    async def act(self, observation: Observation) -> Action:
        """Click the first element."""
        self.steps += 1
        return Action(observation.choices[0])

    def reward(self, value: float, **parts: float) -> None:
        """Take no notice."""


def memory_mb() -> float:
    """Return what the browser and its driver hold, shared pages shared out (PSS)."""
    children = psutil.Process().children(recursive=True)
    return sum(child.memory_full_info().pss for child in children) / 2**20


async def bench(contexts: int) -> dict[str, float]:
    """Play at one number of contexts; return medians."""
    config = BrowserEnvConfig(
        tasks=[*TASKS], max_steps=STEPS, browser=BrowserConfig(contexts=contexts)
    )
    env = BrowserEnv(None, config)
    await env.setup()
    resets, rates = list[float](), list[float]()
    try:
        rows = islice(BrowserEnv.rows(config, split="train", seed=1), EPISODES)
        tasks = [Task(row["prompt"], row["prompt"], None, row["extra_info"]) for row in rows]
        empty = memory_mb()
        for _ in range(REPEATS + 1):  # the first makes the contexts and fills the caches
            begin = time.perf_counter()
            players = [Clicker() for _ in tasks]
            each: list[tuple[Task, Any]] = [*zip(tasks, players, strict=True)]
            await asyncio.gather(*(env.run(task, agent=player) for task, player in each))
            seconds = time.perf_counter() - begin
            rates.append(sum(player.steps for player in players) / seconds)
        grown = memory_mb() - empty
        async with env.browser.page() as page:
            for task in tasks:
                begin = time.perf_counter()
                await env._begin(page, task.prompt, 1)
                resets.append(time.perf_counter() - begin)
            await page.open(f"{env.files.address}/{page_path('click-test')}")
    finally:
        await env.close()
    return {
        "steps_per_s": statistics.median(rates[1:]),
        "mb_per_context": grown / contexts,
        "browser_mb": empty,
        "reset_ms": 1000 * statistics.median(resets),
    }


def main() -> int:
    """Print the table and write out/bench/browser.json."""
    metrics = {str(contexts): asyncio.run(bench(contexts)) for contexts in CONTEXTS}
    print(f"MiniWoB++, {EPISODES} episodes of {STEPS} steps x {REPEATS}, resets included:")
    print(f"  {'contexts':>8} {'steps/s':>8} {'MB each':>8} {'MB empty':>9} {'reset ms':>9}")
    for contexts, at in metrics.items():
        rate, each, empty, reset = at.values()
        print(f"  {contexts:>8} {rate:8.1f} {each:8.1f} {empty:9.1f} {reset:9.1f}")
    out = ROOT / "out" / "bench" / "browser.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(metrics, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
